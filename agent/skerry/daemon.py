"""The composition root: builds the parts from the configuration, hands each what it uses, and runs the service."""

import asyncio
import logging
import os
import platform
import re
import signal
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import msgspec

from skerry import systemd
from skerry.arena import Arena, Layout
from skerry.config import Config, Matmul, Paths, keys, load
from skerry.decoder import Decoder
from skerry.engine import Engine
from skerry.errors import ConfigError, ModelError, SkerryError
from skerry.host import Host
from skerry.modelfile import ModelFolder, find_model
from skerry.service import Service
from skerry.session import Sessions
from skerry.text import Text
from skerry.transport.mqtt import MqttTransport, check_mqtt
from skerry.transport.serial import SerialTransport

log = logging.getLogger(__name__)

LIVE = ("chat", "sampling", "service")
"""Sections that a reload brings into force; the others want a restart."""

_CHECKOUT = Path(__file__).parents[2]


def model_search() -> tuple[Path, ...]:
    """Folders in which a model is looked for by name: a checkout's own, then those of an installed system."""
    own = (_CHECKOUT / "models",) if (_CHECKOUT / "pyproject.toml").is_file() else ()
    return (*own, Path("/var/lib/skerry/models"), Path("/usr/share/skerry/models"))


def cache_dir(config: Config, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where prepacked weights go; None for nowhere. systemd names the unit's CacheDirectory= in the environment."""
    if not config.model.prepack:
        return None
    if config.model.cache_dir:
        return Path(config.model.cache_dir)
    if given := environment.get("CACHE_DIRECTORY"):
        return Path(given.split(":")[0])
    return Path(environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "skerry"


def build_engine(config: Config, host: Host) -> Engine:
    """Open the model, allocate and lock the arena, run the largest shapes once.

    Raises ConfigError when the configuration asks for a model or a size that this machine does not have, ModelError for
    a broken model.
    """
    model = _open_model(config)
    manifest = model.manifest
    layout = Layout(manifest.geometry, manifest.groups, config.arena.slots, config.arena.max_tokens)
    _check_fits(config, model, layout, host)
    tokens = manifest.tokens
    text = Text(model.path, tokens.end, tokens.bos, tokens.add_bos)
    sessions = Sessions(
        model,
        host,
        f32=config.model.matmul == Matmul.F32,
        threads=config.model.threads,
        spin=config.model.spin,
        cache_dir=cache_dir(config),
    )
    decoder = Decoder(model, sessions, Arena(layout, config.arena.lock))
    batched = decoder.warm_up()
    if not batched:
        log.info("slots are decoded in turn: a batch is slower on this machine")
    host.trim_heap()
    return Engine(decoder, text, batched)


def serve(paths: Paths) -> None:
    """`skerry run`: answer until SIGTERM or SIGINT; SIGHUP reads the configuration again.

    Raises SkerryError when the service cannot start.
    """
    config = load(paths)
    host = Host()
    engine = build_engine(config, host)
    asyncio.run(_serve(paths, config, host, engine))


async def _serve(paths: Paths, config: Config, host: Host, engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    service = Service(engine, config, host, node_name(config), Path(config.model.path).name)
    service.on_reload = lambda: reload(service, paths)
    transports: list[SerialTransport | MqttTransport] = []
    if config.serial.ports:
        transports.append(SerialTransport(config.serial, service, host))
    if config.mqtt.url:
        transports.append(MqttTransport(config.mqtt, service, host))
    if not transports:
        log.warning("nobody can ask: neither serial.ports nor mqtt.url is set")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, _reload_by_signal, service)
    for transport in transports:
        transport.start()
    watchdog = loop.create_task(_feed_watchdog(service))
    systemd.notify("READY=1")
    log.info("ready: %s with %d slots of %d tokens", config.model.path, config.arena.slots, config.arena.max_tokens)
    await stopped.wait()
    log.info("stopping: answers under way get %g s", service.config.service.drain_s)
    systemd.notify("STOPPING=1")
    await service.stop(service.config.service.drain_s)
    for transport in transports:
        await transport.stop()
    watchdog.cancel()


async def _feed_watchdog(service: Service) -> None:
    """Tell systemd that the engine makes progress, and only while it does: a hung one is restarted."""
    period_s = systemd.watchdog_period_s()
    if period_s is None:
        return
    seen = -1
    while True:
        if (progress := service.progress) != seen:
            seen = progress
            systemd.notify("WATCHDOG=1")
        await asyncio.sleep(period_s)


def node_name(config: Config) -> str:
    """The board's name in topics: the configured one, else the host's, as far as a topic can hold it."""
    return config.service.node or re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()) or "skerry"


def reload(service: Service, paths: Paths) -> tuple[str, ...]:
    """Bring the live sections of the configuration into force; returns what else has changed and wants a restart.

    Raises ConfigError with every problem; nothing has changed then.
    """
    new, old = load(paths), service.config
    check(new)
    live = msgspec.structs.replace(old, **{name: getattr(new, name) for name in LIVE})
    # The node's name is in topics that are subscribed.
    live = msgspec.structs.replace(live, service=msgspec.structs.replace(live.service, node=old.service.node))
    service.config = live
    return tuple(
        f"{key.path}: takes effect at the next start"
        for key in keys()
        if attrgetter(key.path)(new) != attrgetter(key.path)(live)
    )


def check(config: Config) -> None:
    """What the structs alone cannot tell: the model and its limits, the broker's address and files, the node's name.

    Raises ConfigError with every problem.
    """
    problems: list[str] = []
    hints: list[str] = []
    for part in (_check_model, _check_mqtt):
        try:
            part(config)
        except ConfigError as error:
            problems += error.problems
            hints += [error.hint] * bool(error.hint)
    if problems:
        raise ConfigError(problems, "; ".join(hints))


def _check_model(config: Config) -> None:
    model = _open_model(config)
    _check_context(config, model)


def _check_mqtt(config: Config) -> None:
    if config.mqtt.url:
        check_mqtt(config.mqtt, node_name(config))


def _reload_by_signal(service: Service) -> None:
    systemd.notify("RELOADING=1")
    try:
        done = service.reload()
        log.info("configuration read again%s", "".join(f"; {note}" for note in done.notes))
    except SkerryError as error:
        log.error("%s", error)
    systemd.notify("READY=1")


def _check_fits(config: Config, model: ModelFolder, layout: Layout, host: Host) -> None:
    """Refuse before anything is loaded what could only end at the OOM killer."""
    _check_context(config, model)
    limits = [limit for limit in (host.memory_limit(), host.mem_available()) if limit is not None]
    need = layout.bytes + model.weight_bytes
    if limits and need > min(limits):
        per_token = layout.bytes // (layout.slots * layout.max_tokens)
        raise ConfigError(
            [
                f"arena.max_tokens: {config.arena.slots} slots of {config.arena.max_tokens} tokens need "
                f"{layout.bytes / 1e6:,.0f} MB beside {model.weight_bytes / 1e6:,.0f} MB of weights; "
                f"{min(limits) / 1e6:,.0f} MB are available"
            ],
            f"lower arena.max_tokens or arena.slots: a token takes {per_token:,} bytes",
        )


def _open_model(config: Config) -> ModelFolder:
    try:
        return ModelFolder(find_model(config.model.path, model_search()))
    except ModelError as error:
        raise ConfigError([f"model.path: {error.message}"], error.hint) from None


def _check_context(config: Config, model: ModelFolder) -> None:
    context = model.manifest.geometry.context
    if config.arena.max_tokens > context:
        raise ConfigError(
            [f"arena.max_tokens: {config.arena.max_tokens} is beyond the {context} tokens that the model was made for"]
        )
