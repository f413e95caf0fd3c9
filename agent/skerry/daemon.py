"""The composition root: builds the parts from the configuration and hands each what it uses."""

import os
from collections.abc import Mapping
from pathlib import Path

from skerry.arena import Arena, Layout
from skerry.config import Config, Matmul
from skerry.decoder import Decoder
from skerry.engine import Engine
from skerry.errors import ConfigError, ModelError
from skerry.host import Host
from skerry.modelfile import ModelFolder, find_model
from skerry.session import Sessions
from skerry.text import Text

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
    try:
        model = ModelFolder(find_model(config.model.path, model_search()))
    except ModelError as error:
        raise ConfigError([f"model.path: {error.message}"], error.hint) from None
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
    decoder.warm_up()
    host.trim_heap()
    return Engine(decoder, text)


def _check_fits(config: Config, model: ModelFolder, layout: Layout, host: Host) -> None:
    """Refuse before anything is loaded what could only end at the OOM killer."""
    context = model.manifest.geometry.context
    if config.arena.max_tokens > context:
        raise ConfigError(
            [f"arena.max_tokens: {config.arena.max_tokens} is beyond the {context} tokens that the model was made for"]
        )
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
