"""The configuration: defaults, the board's file, /etc/skerry/skerry.yaml and its drop-ins, as one frozen struct.

Later tiers override earlier ones; sections merge, lists replace. The structs below are the only source of the keys,
their defaults, ranges and descriptions: reading, messages, `dump-config`, the JSON schema and docs/config.md are all
derived from them, so a new section is one more struct and its field in Config.

Knows nothing of what the values mean to the other parts: that a model exists, or that the arena fits in memory.
"""

from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta, Struct

from skerry.core import Sampling
from skerry.errors import ConfigError
from skerry.typedyaml import Leaf, TypedFile, did_you_mean, leaves, printable

Text = Annotated[str, Meta(min_length=1)]


class Matmul(StrEnum):
    INT8 = "int8"
    F32 = "f32"


class Model(Struct, frozen=True, kw_only=True):
    """Which model answers, and how it is run."""

    path: Annotated[
        str, Meta(min_length=1, description="Name of an installed model, or the path of a model's folder.")
    ] = "smollm2-135m-instruct"
    matmul: Annotated[
        Matmul, Meta(description="int8 rounds activations to 8 bits; f32 is exact and about twice slower.")
    ] = Matmul.INT8
    threads: Annotated[int, Meta(ge=0, le=64, description="Worker threads of the model; 0 chooses by the board.")] = 0
    spin: Annotated[
        bool, Meta(description="Workers wait between operations by spinning: faster, but other programs get less CPU.")
    ] = True
    prepack: Annotated[
        bool, Meta(description="Keep the weights in cache_dir in this CPU's own layout, so that later starts map them.")
    ] = True
    cache_dir: Annotated[
        Text | None,
        Meta(
            description="Directory for what can be computed again, like prepacked weights; null takes the service's "
            "own (/var/cache/skerry), or ~/.cache/skerry."
        ),
    ] = None


class Arena(Struct, frozen=True, kw_only=True):
    """The memory for conversations, reserved once at start."""

    slots: Annotated[int, Meta(ge=1, le=64, description="Conversations held in memory at the same time.")] = 1
    max_tokens: Annotated[
        int, Meta(ge=256, le=1_048_576, description="Tokens of one slot: the conversation and its answer together.")
    ] = 2048
    lock: Annotated[bool, Meta(description="Lock the arena into RAM (mlock), so that it is never swapped out.")] = True


class Chat(Struct, frozen=True, kw_only=True):
    """What every conversation starts from, and where an answer ends."""

    system_prompt: Annotated[
        str, Meta(description="Instructions put before every conversation; empty leaves them to the model's template.")
    ] = "You answer questions briefly and correctly."
    max_tokens: Annotated[int, Meta(ge=1, le=1_048_576, description="Tokens after which an answer is cut off.")] = 512
    stop: Annotated[tuple[Text, ...], Meta(description="An answer ends before any of these texts.")] = ()


class Service(Struct, frozen=True, kw_only=True):
    """How much is taken on at once, and from whom."""

    node: (
        Annotated[
            Text, Meta(max_length=64, description="The board's name in topics and status; null is the host name.")
        ]
        | None
    ) = None
    queue: Annotated[int, Meta(ge=1, le=1024, description="Requests that may wait; one more is told to retry.")] = 16
    per_client: Annotated[int, Meta(ge=1, le=64, description="Requests that one client may have at a time.")] = 4
    sessions: Annotated[
        int, Meta(ge=1, le=1024, description="Conversations that are remembered; the oldest idle one makes room.")
    ] = 32
    prompt_bytes: Annotated[int, Meta(ge=256, le=1_048_576, description="Bytes of text in one question.")] = 32_768
    drain_s: Annotated[
        float, Meta(ge=0, le=300, description="Seconds that answers under way get to finish when the service stops.")
    ] = 10.0
    log_text: Annotated[
        bool, Meta(description="Write questions and answers to the log; leave it off where people's words are private.")
    ] = False


class Parity(StrEnum):
    NONE = "none"
    EVEN = "even"
    ODD = "odd"


class Flow(StrEnum):
    NONE = "none"
    RTSCTS = "rtscts"
    XONXOFF = "xonxoff"


class Port(Struct, frozen=True, kw_only=True):
    """One serial port."""

    device: Annotated[str, Meta(min_length=1, description="Device, such as /dev/ttyS4 or /dev/serial/by-id/...")]
    baud: Annotated[int, Meta(ge=300, le=4_000_000, description="Bits per second.")] = 115_200
    parity: Annotated[Parity, Meta(description="Parity bit.")] = Parity.NONE
    flow: Annotated[Flow, Meta(description="Flow control: by lines, by characters, or none.")] = Flow.NONE


class Serial(Struct, frozen=True, kw_only=True):
    """Serial ports on which people and programs talk to the board."""

    ports: Annotated[
        tuple[Port, ...], Meta(description="The ports; one that is absent is opened when it appears.")
    ] = ()
    line_bytes: Annotated[int, Meta(ge=256, le=1_048_576, description="Longest line that is taken.")] = 65_536
    buffer_bytes: Annotated[
        int, Meta(ge=4096, le=16_777_216, description="Output kept for a peer that stops reading, before answers end.")
    ] = 262_144


class Mqtt(Struct, frozen=True, kw_only=True):
    """The MQTT 5 broker through which the board is asked."""

    url: (
        Annotated[Text, Meta(description="mqtt://host[:port] or mqtts://host[:port]; null does without MQTT.")] | None
    ) = None
    client_id: Annotated[Text, Meta(description="Client identifier; null is skerry- and the node's name.")] | None = (
        None
    )
    username: Annotated[Text, Meta(description="User name at the broker.")] | None = None
    password_file: (
        Annotated[Text, Meta(description="File that holds the password; only its owner may be able to read it.")] | None
    ) = None
    ca_file: Annotated[Text, Meta(description="Certificates to trust; null is the system's.")] | None = None
    cert_file: (
        Annotated[Text, Meta(description="The board's own certificate, for brokers that ask for one.")] | None
    ) = None
    key_file: Annotated[Text, Meta(description="Key of cert_file; only its owner may be able to read it.")] | None = (
        None
    )
    qos: Annotated[int, Meta(ge=0, le=2, description="Quality of service of subscriptions and answers.")] = 1
    keepalive_s: Annotated[int, Meta(ge=5, le=3600, description="Seconds of silence before the link is checked.")] = 30
    queue_messages: Annotated[
        int, Meta(ge=16, le=65_536, description="Outgoing messages kept while the broker is away or slow.")
    ] = 1024
    telemetry_period_s: Annotated[float, Meta(ge=1, le=86_400, description="Seconds between telemetry messages.")] = (
        60.0
    )
    fleet: Annotated[
        bool, Meta(description="Take a share of the questions that are asked of all boards (skerry/fleet/ask).")
    ] = False
    discovery_prefix: (
        Annotated[
            Text,
            Meta(
                description="Topic prefix of Home Assistant's discovery, usually homeassistant; null announces nothing."
            ),
        ]
        | None
    ) = None


class Config(Struct, frozen=True, kw_only=True):
    """All settings."""

    board: Annotated[Text | None, Meta(description="Board file whose values come before this file's own.")] = None
    model: Model = Model()
    arena: Arena = Arena()
    chat: Chat = Chat()
    sampling: Sampling = Sampling()
    service: Service = Service()
    serial: Serial = Serial()
    mqtt: Mqtt = Mqtt()


class Paths(Struct, frozen=True, kw_only=True):
    """Where the tiers are. `file` may be absent unless `must_exist`; `drop_ins` None reads none."""

    boards: Path = Path("/usr/lib/skerry/boards")
    file: Path = Path("/etc/skerry/skerry.yaml")
    drop_ins: Path | None = Path("/etc/skerry/conf.d")
    must_exist: bool = False


Origins = dict[str, str]
"""Dotted key path -> `file:line` of the value that won."""


def load(paths: Paths) -> Config:
    """Read all tiers. Raises ConfigError with every problem of every file."""
    return load_with_origins(paths)[0]


def load_with_origins(paths: Paths) -> tuple[Config, Origins]:
    """As `load`, and where each value that a file sets came from."""
    problems: list[str] = []
    files = [paths.file] if paths.must_exist or not _absent(paths.file) else []
    tiers = [TypedFile(path, Config) for path in files + _drop_ins(paths.drop_ins, problems)]
    tiers = _board(paths.boards, tiers, problems) + tiers
    problems = [problem for tier in tiers for problem in tier.problems] + problems
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {}
    origins: Origins = {}
    for tier in tiers:
        values = _merged(values, tier.values)
        origins |= tier.origins
    return msgspec.convert(values, Config), origins


def keys() -> list[Leaf]:
    """Every key, in the order of the structs."""
    return list(leaves(Config))


def dump(config: Config) -> str:
    """The whole configuration as YAML, each key below its description; it loads to the same configuration."""
    return _rendered(config, keys(), lambda key, line: [f"# {key.description} ({key.wanted})", line])


def changes(config: Config, origins: Origins) -> str:
    """Only what differs from the defaults, as YAML, each with the file and line it came from."""
    changed = [key for key in keys() if attrgetter(key.path)(config) != attrgetter(key.path)(Config())]
    return _rendered(config, changed, lambda key, line: [f"{line}  # {origins.get(key.path, 'not from a file')}"])


def yaml_value(value: object) -> str:
    """A value on one line of YAML; texts are always quoted, so that no reader takes them for something else."""
    plain = msgspec.to_builtins(value)
    text: str = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, sort_keys=False, width=2**31
    )
    return text.removesuffix("...\n").rstrip("\n")


def json_schema() -> dict[str, Any]:
    """The JSON schema of the /etc file, for editors."""
    schema = msgspec.json.schema(Config)
    for definition in schema["$defs"].values():
        if definition.get("type") == "object":
            definition["additionalProperties"] = False
            definition["description"] = definition["description"].partition("\n")[0]  # the rest is for programmers
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _rendered(config: Config, chosen: list[Leaf], lines: Callable[[Leaf, str], list[str]]) -> str:
    """YAML of the chosen keys; `lines` turns a key and its line into the lines to print."""
    out: list[str] = []
    opened: list[str] = []
    for key in chosen:
        *sections, name = key.path.split(".")
        for depth, section in enumerate(sections):
            if opened[: depth + 1] != sections[: depth + 1]:
                out.append(f"{'  ' * depth}{section}:")
        opened = sections
        value = yaml_value(attrgetter(key.path)(config))
        out += ["  " * len(sections) + line for line in lines(key, f"{name}: {value}")]
    return "".join(f"{line}\n" for line in out)


def _absent(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # such as a folder that may not be searched: reading the file will say so
        return False
    return False


def _drop_ins(folder: Path | None, problems: list[str]) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder else []
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{printable(str(folder))}: cannot be read: {error.strerror}")
        return []
    # A drop-in that is left out without a word is a long search for its author.
    problems += [f"{printable(str(path))}: is not read; name it *.yaml" for path in found if path.suffix == ".yml"]
    return [path for path in found if path.suffix == ".yaml"]


def _board(folder: Path, tiers: list[TypedFile], problems: list[str]) -> list[TypedFile]:
    """The tier of the board that the last of the other tiers names, if any does."""
    naming = [tier for tier in tiers if "board" in tier.values]
    if not naming or (name := naming[-1].values["board"]) is None:
        return []
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:  # which also keeps `../` out
        listed = f"known in {printable(str(folder))}: {', '.join(known) or 'none'}"
        place = naming[-1].origins["board"]
        problems.append(f"{place}: board: unknown board {printable(name)}{did_you_mean(name, known)}; {listed}")
        return []
    tier = TypedFile(folder / f"{name}.yaml", Config)
    if "board" in tier.values:
        problems.append(f"{tier.origins['board']}: board: a board file cannot name a board")
    return [tier]


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    sections = {key for key, value in over.items() if isinstance(value, dict) and key in base}
    return base | over | {key: _merged(base[key], over[key]) for key in sections}
