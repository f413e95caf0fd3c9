"""The command line as a person and a program use it: real processes, a pseudo-terminal for the chat."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SKERRY = [sys.executable, "-m", "skerry.cli"]


def skerry(*arguments: str | Path, config: str = "", folder: Path, **options) -> subprocess.CompletedProcess[str]:
    file = folder / "skerry.yaml"
    file.write_text(config)
    command = [*SKERRY, "--config", str(file), *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, **options)


def small(model: Path, more: str = "") -> str:
    return f"model: {{path: {model}, threads: 1}}\narena: {{max_tokens: 256}}\nchat: {{max_tokens: 16}}\n{more}"


def test_ask_answers(tiny_model: Path, tmp_path: Path) -> None:
    plain = skerry("ask", "Hello?", config=small(tiny_model), folder=tmp_path)
    assert plain.returncode == 0 and plain.stdout.strip() and plain.stderr == ""
    again = skerry("ask", "--json", "-", config=small(tiny_model), folder=tmp_path, input="Hello?")
    result = json.loads(again.stdout)
    assert result["text"] == plain.stdout.removesuffix("\n")
    assert result.keys() == {"text", "reason", "tier", "compacted", "truncated", "tokens", "timings_ms"}
    assert result["tokens"].keys() == {"prompt", "reused", "generated", "drafted", "accepted"}
    assert result["timings_ms"].keys() == {"queue", "prefill", "first", "total"}
    assert result["tokens"]["generated"] == 16 and result["reason"] == "length"


def test_max_tokens_of_one_question(tiny_model: Path, tmp_path: Path) -> None:
    done = skerry("ask", "--json", "--max-tokens", "3", "Hello?", config=small(tiny_model), folder=tmp_path)
    assert json.loads(done.stdout)["tokens"]["generated"] == 3


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["nonsense"], 2),
        (["ask"], 2),
        (["ask", "--max-tokens", "0", "x"], 2),
        (["ask", "word " * 5000], 1),
        (["ask", ""], 0),
        (["--version"], 0),
        (["check-config"], 0),
    ],
)
def test_exit_codes(tiny_model: Path, tmp_path: Path, arguments: list[str], code: int) -> None:
    done = skerry(*arguments, config=small(tiny_model), folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ask - <&-", 1),
        ("chat <&-", 0),
        ("ask hello >/dev/full", 1),
        ("ask --json hello >/dev/full", 1),
        ("ask - </dev/urandom", 1),
        ("ask - < <(head -c 60 /dev/urandom)", 0),
        (f"ask --model {'x' * 5000} hello", 78),
    ],
)
def test_strange_surroundings_are_no_traceback(tiny_model: Path, tmp_path: Path, line: str, code: int) -> None:
    file = tmp_path / "skerry.yaml"
    file.write_text(small(tiny_model))
    for encoding in ("utf-8", "ascii", "utf-8:strict"):
        environment = os.environ | {"PYTHONIOENCODING": encoding, "XDG_CACHE_HOME": str(tmp_path)}
        command = f"{sys.executable} -m skerry.cli --config {file} {line}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('mqtt: {url: "http://x"}\n', "mqtt.url"),
        ('mqtt: {url: "mqtt://x", password_file: /nowhere}\n', "mqtt.password_file"),
        ('mqtt: {url: "mqtt://x"}\nservice: {node: a/b}\n', "service.node"),
        ("arena: {max_tokens: 1048576}\n", "arena.max_tokens"),
        ("model: {path: /nowhere}\n", "model.path"),
    ],
)
def test_check_config_finds_what_run_would_refuse(tiny_model: Path, tmp_path: Path, config: str, words: str) -> None:
    config = config if "model:" in config else f"model: {{path: {tiny_model}}}\n{config}"
    done = skerry("check-config", config=config, folder=tmp_path)
    assert done.returncode == 78 and words in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("model: {path: /nowhere}\n", ["model.path", "/nowhere", "make setup"]),
        ("model: {path: no-such-model}\n", ["model.path", "no-such-model"]),
        ("arena: {max_tokenz: 5}\nchat: {max_tokens: 0}\n", ["skerry.yaml:1: arena.max_tokenz", "skerry.yaml:2: chat"]),
    ],
)
def test_bad_configuration_exits_78_and_says_where(tmp_path: Path, config: str, words: list[str]) -> None:
    done = skerry("ask", "x", config=config, folder=tmp_path)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_an_arena_that_cannot_fit_is_refused_before_it_is_loaded(tiny_models, tmp_path: Path) -> None:
    vast = tiny_models("llama", max_position_embeddings=1_048_576)
    config = f"model: {{path: {vast}}}\narena: {{slots: 64, max_tokens: 1048576}}\n"
    done = skerry("ask", "x", config=config, folder=tmp_path)
    assert done.returncode == 78
    assert "arena.max_tokens" in done.stderr and "MB are available" in done.stderr


def test_more_tokens_than_the_model_was_made_for_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = f"model: {{path: {tiny_model}}}\narena: {{max_tokens: 100000}}\n"
    done = skerry("ask", "x", config=config, folder=tmp_path)
    assert done.returncode == 78 and "arena.max_tokens" in done.stderr


def test_a_broken_model_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", tiny_model, broken], check=True)
    (broken / "body.bin").write_bytes(b"short")
    done = skerry("ask", "x", "--model", broken, config=small(tiny_model), folder=tmp_path)
    assert done.returncode in (1, 78) and "body.bin" in done.stderr and "Traceback" not in done.stderr


def test_dump_config(tiny_model: Path, tmp_path: Path) -> None:
    config = small(tiny_model)
    changes = skerry("dump-config", "--changes", config=config, folder=tmp_path).stdout
    assert "max_tokens: 256" in changes and "skerry.yaml:2" in changes and "lock" not in changes
    whole = skerry("dump-config", config=config, folder=tmp_path).stdout
    assert "lock: true" in whole
    again = tmp_path / "again"
    again.mkdir()
    assert skerry("dump-config", config=whole, folder=again).stdout == whole
    assert (
        json.loads(skerry("dump-config", "--json", config=config, folder=tmp_path).stdout)["arena"]["max_tokens"] == 256
    )


def test_a_reader_that_goes_away_is_no_traceback(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "skerry.yaml"
    file.write_text(small(tiny_model))
    command = f"{sys.executable} -m skerry.cli --config {file} ask Hello | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


READY = r"/help for more[^>]*> "
"""The prompt too: what is typed before it, Ctrl-D above all, can be lost while the terminal changes its mode."""


class Chat:
    """`skerry chat` on a pseudo-terminal."""

    def __init__(self, config: Path, environment: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(sys.executable, [*SKERRY, "--config", str(config), "chat"], os.environ | environment)
        self.seen = ""

    def expect(self, pattern: str, timeout_s: float = 60) -> str:
        """Read until the pattern is on the screen; returns what came before and with it, without control sequences."""
        begin, deadline = len(self.seen), time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen[begin:])):
            ready = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"no {pattern!r} in {self.seen[begin:]!r}"
            try:
                self.seen += re.sub(r"\x1b(7|8|\[[0-9;?]*[a-zA-Z])", "", os.read(self.fd, 65536).decode())
            except OSError:
                raise AssertionError(f"it ended: {self.seen!r}") from None
        return self.seen[begin : begin + found.end()]

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def insist(self, text: str, pattern: str) -> None:
        """Send until it is answered: what is typed around an interrupt, or just before the prompt, may be dropped."""
        for _ in range(30):
            self.send(text)
            try:
                self.expect(pattern, timeout_s=1)
                return
            except AssertionError:
                continue
        raise AssertionError(f"no {pattern!r} in {self.seen!r}")

    def exit_code(self, timeout_s: float = 60) -> int:
        while True:
            assert select.select([self.fd], [], [], timeout_s)[0], f"it does not end: {self.seen!r}"
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(params=["xterm", "dumb"])
def chat(request, tiny_model: Path, tmp_path: Path):
    file = tmp_path / "skerry.yaml"
    file.write_text(small(tiny_model))
    chat = Chat(file, {"TERM": request.param, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    yield chat
    with contextlib.suppress(ProcessLookupError):
        os.kill(chat.pid, signal.SIGKILL)
    os.close(chat.fd)


def test_chat(chat: Chat) -> None:
    chat.expect(READY)
    chat.send("/status\r")
    chat.expect(r"arena 0/256 tokens")
    for text in ("Hello there", "And now?", "日本 🎉"):
        chat.send(text + "\r")
        time.sleep(0.5)
        chat.send("/status\r")
        chat.expect(r"arena [1-9][0-9]*/256 tokens")
    chat.send("/nonsense\r")
    chat.expect("no such command")
    chat.insist("\x03", "leaves")
    chat.insist("/reset\r", "new conversation")
    chat.send("/quit\r")
    assert chat.exit_code() == 0


def test_chat_ends_with_the_input(chat: Chat) -> None:
    chat.expect(READY)
    chat.send("\x04")
    assert chat.exit_code() == 0


def test_chat_survives_a_question_that_is_too_long_and_an_interrupted_answer(chat: Chat) -> None:
    chat.expect(READY)
    chat.send(f"{'word ' * 700}\r")
    chat.expect("a conversation holds 256")
    chat.send("Go on\r")
    chat.expect("Go on")
    chat.send("\x03")
    chat.insist("/status\r", r"arena [0-9]+/256 tokens")
    chat.send("/quit\r")
    assert chat.exit_code() == 0


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france(default_model: Path, tmp_path: Path) -> None:
    done = skerry("ask", "What is the capital of France?", config=f"model: {{path: {default_model}}}", folder=tmp_path)
    assert done.returncode == 0 and "Paris" in done.stdout
