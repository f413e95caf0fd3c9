"""The configuration: tiers, messages, and that no text whatever gets past them as anything but a ConfigError."""

import os
import re
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.config import (
    Arena,
    Chat,
    Config,
    Flow,
    Matmul,
    Model,
    Parity,
    Paths,
    Port,
    Serial,
    changes,
    dump,
    json_schema,
    keys,
    load,
)
from skerry.config import load_with_origins as with_origins
from skerry.core import Sampling
from skerry.errors import ConfigError, RequestError
from skerry.typedyaml import MAX_BYTES
from tools.configdoc import ROOT, documents


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """An empty board: no file of any tier exists yet, but the folders do."""
    paths = Paths(boards=tmp_path / "boards", file=tmp_path / "skerry.yaml", drop_ins=tmp_path / "conf.d")
    paths.boards.mkdir()
    (tmp_path / "conf.d").mkdir()
    return paths


def problems(paths: Paths) -> list[str]:
    """The problems, with the folder of the test left out."""
    with pytest.raises(ConfigError) as raised:
        load(paths)
    assert all("\n" not in problem for problem in raised.value.problems)
    return [problem.replace(f"{paths.file.parent}/", "") for problem in raised.value.problems]


# --- tiers ---


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "# only a comment\n", "---\n", "{}", "arena:\n", "null", "arena: {}", "﻿arena: {}\n", "--- {}\n...\n"],
)
def test_an_empty_file_is_the_defaults(paths: Paths, text: str) -> None:
    paths.file.write_text(text)
    assert load(paths) == Config()


def test_no_file_is_the_defaults_unless_it_was_named(paths: Paths, tmp_path: Path) -> None:
    assert load(paths) == Config()
    assert load(Paths(file=tmp_path / "none", drop_ins=tmp_path / "nor this")) == Config()
    assert load(Paths(file=tmp_path / "none", drop_ins=None)) == Config()
    named = msgspec.structs.replace(paths, must_exist=True)
    assert problems(named) == ["skerry.yaml: cannot be read: No such file or directory"]


def test_later_tiers_override_sections_merge_and_lists_replace(paths: Paths) -> None:
    (paths.boards / "rock.yaml").write_text("arena: {slots: 2, max_tokens: 4096, lock: false}\nchat: {stop: [a, b]}\n")
    paths.file.write_text("board: rock\narena:\n  max_tokens: 1024\n")
    assert paths.drop_ins
    (paths.drop_ins / "20-second.yaml").write_text("chat:\n  stop: [d]\n")
    (paths.drop_ins / "10-first.yaml").write_text("chat:\n  stop: [c]\nmodel:\n  matmul: f32\n")
    (paths.drop_ins / ".hidden.yaml").write_text("not read: [")
    (paths.drop_ins / "README").write_text("not read: [")
    config, origins = with_origins(paths)
    assert config == Config(
        board="rock",
        model=Model(matmul=Matmul.F32),
        arena=Arena(slots=2, max_tokens=1024, lock=False),
        chat=Chat(stop=("d",)),
    )
    folder = paths.file.parent
    assert changes(config, origins) == (
        f'board: "rock"  # {folder}/skerry.yaml:1\n'
        f'model:\n  matmul: "f32"  # {folder}/conf.d/10-first.yaml:4\n'
        f"arena:\n  slots: 2  # {folder}/boards/rock.yaml:1\n  max_tokens: 1024  # {folder}/skerry.yaml:3\n"
        f"  lock: false  # {folder}/boards/rock.yaml:1\n"
        f'chat:\n  stop: ["d"]  # {folder}/conf.d/20-second.yaml:2\n'
    )


def test_a_drop_in_can_take_the_board_away(paths: Paths) -> None:
    paths.file.write_text("board: gone\n")
    assert paths.drop_ins
    (paths.drop_ins / "a.yaml").write_text("board: null\n")
    assert load(paths) == Config()


@pytest.mark.parametrize("name", ["rok", "../skerry", "/etc/passwd", "''", '"a\\0b"', "."])
def test_an_unknown_board_lists_the_known_ones(paths: Paths, name: str) -> None:
    (paths.boards / "rock.yaml").write_text("")
    (paths.boards / "mx8.yaml").write_text("")
    paths.file.write_text(f"arena:\nboard: {name}\n")
    found = problems(paths)
    assert found[0].startswith("skerry.yaml:2: board: ")
    if name == "rok":
        assert found == [
            f"skerry.yaml:2: board: unknown board rok (did you mean rock?); known in {paths.boards}: mx8, rock".replace(
                f"{paths.file.parent}/", ""
            )
        ]


def test_a_board_file_cannot_name_a_board(paths: Paths) -> None:
    (paths.boards / "rock.yaml").write_text("\nboard: rock\n")
    paths.file.write_text("board: rock\n")
    assert problems(paths) == ["boards/rock.yaml:2: board: a board file cannot name a board"]


def test_every_problem_of_every_file_is_told_at_once(paths: Paths) -> None:
    (paths.boards / "rock.yaml").write_text("arena: {slots: 0}\n")
    paths.file.write_text("board: rock\narena:\n  max_tokenz: 1\n  lock: 1\nchat: {max_tokens: 5.5}\n")
    assert paths.drop_ins
    (paths.drop_ins / "a.yaml").write_text("model: [\n")
    (paths.drop_ins / "b.yml").write_text("")
    (paths.drop_ins / "c.yaml").mkdir()
    found = problems(paths)
    assert found[:4] == [
        "boards/rock.yaml:1: arena.slots: 0 is out of range (use a value between 1 and 64)",
        "skerry.yaml:3: arena.max_tokenz: unknown key (did you mean max_tokens?)",
        "skerry.yaml:4: arena.lock: found the number 1, wanted true or false",
        "skerry.yaml:5: chat.max_tokens: found the number 5.5, wanted a whole number between 1 and 1048576",
    ]
    assert found[4].startswith("conf.d/a.yaml:2: ")
    assert found[5:] == ["conf.d/c.yaml: is a directory, not a file", "conf.d/b.yml: is not read; name it *.yaml"]


# --- values ---


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("sampling: {temperature: 1}", "sampling.temperature", 1.0),
        ("sampling: {temperature: 1e-1}", "sampling.temperature", 0.1),
        ("sampling: {temperature: .5}", "sampling.temperature", 0.5),
        ("sampling: {seed: null}", "sampling.seed", None),
        ("sampling: {seed: 9223372036854775807}", "sampling.seed", 2**63 - 1),
        ("arena: {slots: +3}", "arena.slots", 3),
        ("arena: {lock: off}", "arena.lock", False),
        ("arena: {lock: True}", "arena.lock", True),
        ("model: {matmul: f32}", "model.matmul", Matmul.F32),
        ("model: {path: 'on'}", "model.path", "on"),
        ('model: {path: "1e3"}', "model.path", "1e3"),
        ("model: {path: 192.168.1.10}", "model.path", "192.168.1.10"),
        ("model: {path: v1:30}", "model.path", "v1:30"),
        ("chat: {system_prompt: ''}", "chat.system_prompt", ""),
        ("chat:\n  system_prompt: |\n    Kurz.\n    Grüße: 你好 🦭\n", "chat.system_prompt", "Kurz.\nGrüße: 你好 🦭\n"),
        ("chat:\n  stop:\n  - a\n  - '5'\n", "chat.stop", ("a", "5")),
        ("chat: {stop: []}", "chat.stop", ()),
        ("serial: {ports: []}", "serial.ports", ()),
        (
            "serial:\n  ports:\n  - {device: a, parity: odd, flow: rtscts}\n  - device: b\n    baud: 9600",
            "serial.ports",
            (Port(device="a", parity=Parity.ODD, flow=Flow.RTSCTS), Port(device="b", baud=9600)),
        ),
        ("chat: &anchor {max_tokens: 7}", "chat.max_tokens", 7),
    ],
)
def test_good_values(paths: Paths, text: str, path: str, value: object) -> None:
    paths.file.write_text(text)
    found = attrgetter(path)(load(paths))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # keys
        ("arena:\n  slot: 2", "2: arena.slot: unknown key (did you mean slots?)"),
        ("temperature: 1", "1: temperature: unknown key (did you mean sampling.temperature?)"),
        ("zzz: 1", "1: zzz: unknown key"),
        ('"a\\nb\\e": 1', r"1: 'a\nb\x1b': unknown key"),
        ("arena:\n  slots: 1\n  slots: 1", "3: arena.slots: duplicate key (first on line 2)"),
        ("arena: {}\nchat: {}\narena: {}", "3: arena: duplicate key (first on line 1)"),
        ("? [a]\n: 1", "1: found a list or a section as a key, wanted a name"),
        ("on: 1", "1: on: unknown key"),
        ("<<: {arena: {}}", "1: <<: unknown key"),
        # wrong types
        ("[]", "1: found a list, wanted a section (of keys like board)"),
        ("just text", "1: found the text 'just text', wanted a section (of keys like board)"),
        ("arena: 5", "1: arena: found the number 5, wanted a section (of keys like slots)"),
        ("arena: []", "1: arena: found a list, wanted a section (of keys like slots)"),
        ("arena:\n  slots: {}", "2: arena.slots: found a section, wanted a whole number between 1 and 64"),
        ("arena:\n  slots: '2'", "2: arena.slots: found the text '2', wanted a whole number between 1 and 64"),
        ("arena: {lock: 'true'}", "1: arena.lock: found the text 'true', wanted true or false"),
        ("chat: {stop: a}", "1: chat.stop: found the text 'a', wanted a list, each item text"),
        ("chat:\n  stop:\n  - a\n  - 5\n", "4: chat.stop[1]: found the number 5, wanted text (quote it if it is text)"),
        ("chat: {stop: ['']}", "1: chat.stop[0]: found an empty text, wanted at least one character"),
        ("model: {path: ''}", "1: model.path: found an empty text, wanted at least one character"),
        (f"service: {{node: {'x' * 65}}}", "1: service.node: found 65 characters, wanted at most 64"),
        ("model: {path: true}", "1: model.path: found true, wanted text (quote it if it is text)"),
        ("model: {matmul: int4}", "1: model.matmul: found the text 'int4', wanted one of int8, f32"),
        ("model: {matmul: [f32]}", "1: model.matmul: found a list, wanted one of int8, f32"),
        (
            "arena: {slots: }",
            "1: arena.slots: found nothing (null), wanted a whole number between 1 and 64"
            " (leave the key out to keep the default)",
        ),
        # ranges
        ("arena: {slots: 65}", "1: arena.slots: 65 is out of range (use a value between 1 and 64)"),
        ("arena: {slots: -1}", "1: arena.slots: -1 is out of range (use a value between 1 and 64)"),
        ("sampling: {top_p: 0}", "1: sampling.top_p: 0 is out of range (use a value above 0 and at most 1)"),
        # where YAML surprises
        ("model: {path: on}", "1: model.path: found on (which YAML takes for true), wanted text"),
        ("model: {path: No}", "1: model.path: found No (which YAML takes for false), wanted text"),
        ("model: {path: 1e3}", "1: model.path: found the number 1e3, wanted text (quote it if it is text)"),
        ("model: {path: 08}", "1: model.path: found 08, wanted text (write numbers in plain decimal"),
        ("model: {path: 1:30}", "1: model.path: found 1:30, wanted text"),
        ("model: {path: 2024-01-01}", "1: model.path: found 2024-01-01 (of YAML's type timestamp), wanted text"),
        ("model: {path: =}", "1: model.path: found = (of YAML's type value), wanted text"),
        ("arena: {slots: 1e1}", "1: arena.slots: found the number 1e1, wanted a whole number"),
        ("arena: {slots: 2.0}", "1: arena.slots: found the number 2.0, wanted a whole number"),
        ("arena: {slots: 010}", "1: arena.slots: found 010, wanted a whole number between 1 and 64 (write numbers"),
        ("arena: {slots: 0o10}", "1: arena.slots: found 0o10, wanted a whole number"),
        ("arena: {slots: 0x10}", "1: arena.slots: found 0x10, wanted a whole number"),
        ("arena: {slots: 0b1}", "1: arena.slots: found 0b1, wanted a whole number"),
        ("arena: {slots: 1_0}", "1: arena.slots: found 1_0, wanted a whole number"),
        ("arena: {max_tokens: 17:04}", "1: arena.max_tokens: found 17:04, wanted a whole number"),
        ("sampling: {temperature: .nan}", "1: sampling.temperature: found .nan, wanted a number between 0 and 10"),
        ("sampling: {temperature: -.inf}", "1: sampling.temperature: found -.inf, wanted a number"),
        ("sampling: {temperature: 1e999}", "1: sampling.temperature: found 1e999, wanted a number"),
        (f"sampling: {{seed: {10**39}}}", f"1: sampling.seed: {10**39} is out of range"),
        ("sampling: {seed: " + "9" * 5000 + "}", "1: sampling.seed: found " + "9" * 77 + "..., wanted a whole number"),
        # tags
        (
            "arena: {slots: !!python/name:os.system x}",
            "1: arena.slots: found x (of YAML's type python/name:os.system)",
        ),
        ("arena: !mine {slots: 1}", "1: arena: found a value with the tag !mine, wanted a section"),
        ("arena: {lock: !!bool maybe}", "1: arena.lock: found maybe (of YAML's type bool), wanted true or false"),
        ("arena: {slots: !!int x}", "1: arena.slots: found x, wanted a whole number"),
        # lists of sections
        ("serial: {ports: {}}", "1: serial.ports: found a section, wanted a list, each item a section of device, baud"),
        ("serial: {ports: [a]}", "1: serial.ports[0]: found the text 'a', wanted a section (of keys like device)"),
        ("serial:\n  ports:\n  - baud: 9600", "3: serial.ports[0].device: is missing, wanted text"),
        ("serial:\n  ports:\n  - device: a\n  -\n", "4: serial.ports[1].device: is missing, wanted text"),
        ("serial:\n  ports:\n  - {}", "3: serial.ports[0].device: is missing, wanted text"),
        ("serial:\n  ports:\n  - device:", "3: serial.ports[0].device: found nothing (null), wanted text"),
        ("serial:\n  ports: [{device: a, bauds: 9}]", "2: serial.ports[0].bauds: unknown key (did you mean baud?)"),
        ("serial:\n  ports: [{device: a, baud: 9}]", "2: serial.ports[0].baud: 9 is out of range"),
        (
            "serial:\n  ports:\n  - device: /dev/ttyS4\n  - baud: 9600\n    device: /dev/ttyS4",
            "5: serial.ports[1].device: /dev/ttyS4 is serial.ports[0].device too",
        ),
        # what no text can hold
        (
            r'model: {path: "a\0b"}',
            r"1: model.path: found 'a\x00b', wanted text (it has characters that no text can have)",
        ),
        (r'model: {path: "\ud800"}', r"1: model.path: found '\ud800', wanted text (it has characters"),
        # syntax
        ("arena:\n  slots: 1\n lock: true", "3: "),
        ("arena: {\n", "2: while parsing a flow node, expected the node content, but found '<stream end>'"),
        ("a: 1\n\tb: 2", "2: while scanning for the next token, found character '\\t' that cannot"),
        ("a: b: c", "1: mapping values are not allowed here"),
        ("{}\n---\n{}", "2: expected a single document in the stream, but found another document"),
        ("chat: &a {}\narena: *a", "2: aliases (*name) are not supported"),
        ("chat: &a [*a]", "1: aliases (*name) are not supported"),
        ("[" * 10_000, "1: nested deeper than 32"),
        ("arena: {}\n\a", "2: has the character U+0007, which YAML does not allow"),
        ('arena: {}\nmodel: "\\UFFFFFFFF"', "2: "),
        ("%YAML " + "1" * 5000 + ".0\n--- {}", "1: "),
    ],
)
def test_bad_values(paths: Paths, text: str, problem: str) -> None:
    paths.file.write_text(text)
    (found,) = problems(paths)
    assert found.startswith(f"skerry.yaml:{problem}")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"arena:\n  slots: 1 # caf\xe9\n", "skerry.yaml:2: is not UTF-8 (byte 0xe9)"),
        ("arena: {}".encode("utf-16"), "skerry.yaml:1: is not UTF-8 (byte 0xff)"),
        (b"#" * (MAX_BYTES + 1), "skerry.yaml: is larger than 256 KiB"),
    ],
)
def test_bad_bytes(paths: Paths, data: bytes, problem: str) -> None:
    paths.file.write_bytes(data)
    assert problems(paths) == [problem]


def test_what_is_not_a_file(paths: Paths) -> None:
    paths.file.symlink_to("nowhere")
    assert problems(paths) == ["skerry.yaml: cannot be read: No such file or directory"]
    paths.file.unlink()
    os.mkfifo(paths.file)
    assert problems(paths) == ["skerry.yaml: is a device, not a file"]
    paths.file.unlink()
    paths.file.mkdir()
    assert problems(paths) == ["skerry.yaml: is a directory, not a file"]
    paths.file.rmdir()
    no_folder = msgspec.structs.replace(paths, drop_ins=paths.boards / "rock.yaml")
    (paths.boards / "rock.yaml").touch()
    with pytest.raises(ConfigError, match=r"rock\.yaml/skerry\.yaml: cannot be read: Not a directory"):
        load(msgspec.structs.replace(paths, file=paths.boards / "rock.yaml" / "skerry.yaml"))
    assert problems(no_folder) == ["boards/rock.yaml: cannot be read: Not a directory"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(paths: Paths) -> None:
    paths.file.touch(mode=0)
    assert problems(paths) == ["skerry.yaml: cannot be read: Permission denied"]


_WORDS = [*(key.path.rpartition(".")[2] for key in keys()), "arena", "chat", "model", "sampling", "board"]
_PIECES = [
    *_WORDS,
    "serial: {ports: [{",
    "device: ",
    ": ",
    "\n",
    "\n  ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "&a ",
    "*a",
    "!!int ",
    "!x ",
    '"',
    "'",
    "\\U",
    "|",
    ">",
]
_PIECES += [
    "#",
    "?",
    "%YAML 1.2\n",
    "---\n",
    "...",
    "\t",
    "<<",
    "0",
    "1e3",
    "0x1",
    ".nan",
    "~",
    "on",
    "true",
    "5",
    "f32",
    "\0",
    "é",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(st.one_of(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join).map(str.encode), st.binary(max_size=100)))
def test_any_bytes_load_or_raise_config_error(paths: Paths, data: bytes) -> None:
    paths.file.write_bytes(data)
    try:
        config = load(paths)
    except ConfigError as error:
        assert error.problems
        assert all(problem.isprintable() and str(paths.file) in problem for problem in error.problems)
    else:
        assert isinstance(config, Config)


# --- what is derived from the structs ---


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(), st.lists(st.text(min_size=1), max_size=3), st.floats(0, 10), st.none() | st.integers(0, 2**63 - 1))
def test_a_dump_loads_to_the_same(paths: Paths, prompt: str, stop: list[str], spread: float, seed: int | None) -> None:
    if "\0" in prompt or any("\0" in text for text in stop):
        return
    config = Config(
        model=Model(matmul=Matmul.F32, spin=False),
        chat=Chat(system_prompt=prompt, stop=tuple(stop)),
        sampling=Sampling(temperature=spread, seed=seed),
        serial=Serial(ports=(Port(device="/dev/ttyS4", flow=Flow.XONXOFF), Port(device="on"))),
    )
    paths.file.write_text(dump(config))
    again, origins = with_origins(paths)
    assert again == config
    paths.file.write_text(changes(again, origins))
    assert load(paths) == config


def test_every_key_is_described_and_its_default_is_in_range(paths: Paths) -> None:
    paths.file.write_text(dump(Config()))
    assert load(paths) == Config()
    for key in keys():
        assert re.fullmatch(r"[A-Za-z].*\.", key.description), key.path


def test_the_schema_refuses_unknown_keys() -> None:
    objects = [part for part in json_schema()["$defs"].values() if part.get("type") == "object"]
    assert len(objects) == 9
    assert all(part["additionalProperties"] is False for part in objects)


@pytest.mark.parametrize(("path", "text"), documents().items(), ids=lambda value: getattr(value, "name", ""))
def test_generated_documents_are_up_to_date(path: Path, text: str) -> None:
    assert path.read_text() == text, "run: python -m tools.configdoc"


def test_the_installed_files_are_clean() -> None:
    conf = ROOT / "conf"
    here = Paths(boards=conf / "boards", file=conf / "skerry.yaml", drop_ins=None, must_exist=True)
    assert load(here) == Config()
    for board in here.boards.iterdir():
        load(Paths(file=board, drop_ins=None))


def test_the_template_shows_the_defaults(tmp_path: Path) -> None:
    template = (ROOT / "conf" / "skerry.yaml").read_text()
    file = tmp_path / "skerry.yaml"
    file.write_text(re.sub("^#(?! |$)|^#(?=  )", "", template, flags=re.MULTILINE))
    assert set(yaml.safe_load(file.read_text())) == set(Config.__struct_fields__)
    config, origins = with_origins(Paths(boards=ROOT / "conf" / "boards", file=file, drop_ins=None))
    assert [key for key in changes(config, origins).splitlines() if str(file) in key] == [
        f'board: "emulated"  # {file}:7'
    ]


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"temperature": float("nan")}, "between 0 and 10"),
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "between 0.1 and 10"),
        ({"seed": -1}, "between 0 and 9223372036854775807"),
    ],
)
def test_sampling_made_in_code_has_the_same_ranges(values: dict[str, float], hint: str) -> None:
    with pytest.raises(RequestError) as raised:
        Sampling(**values)  # type: ignore[arg-type]
    assert raised.value.hint == f"use a value {hint}"
