"""`skerry run` as systemd starts it: a real process, a pseudo-terminal as its serial line, a real broker."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.host import Host
from skerry.protocol import Answer, Ask, GetStatus, Status, TokenText
from skerry.remote import MqttLink
from tests.broker import Broker

SKERRY = [sys.executable, "-m", "skerry.cli"]


class Agent:
    """The process, its notify socket, and the two ends of its serial line."""

    def __init__(self, folder: Path, model: Path, broker: Broker | None = None, more: str = "") -> None:
        self.near, far = os.openpty()
        tty.setraw(far)
        os.set_blocking(self.near, False)
        self.line = os.ttyname(far)
        self._far = far
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(str(folder / "notify"))
        self.config = folder / "skerry.yaml"
        self.config.write_text(
            f"model: {{path: {model}, threads: 1, prepack: false}}\narena: {{slots: 2, max_tokens: 256, lock: false}}\n"
            f"chat: {{max_tokens: 8}}\nserial: {{ports: [{{device: {self.line}}}]}}\nservice: {{node: kiosk}}\n{more}"
            + (f'mqtt: {{url: "{broker.url}"}}\n' if broker else "")
        )
        self.log = folder / "log"
        environment = os.environ | {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "400000"}
        with self.log.open("w") as log:
            command = [*SKERRY, "--config", str(self.config), "run"]
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    def expect_notice(self, wanted: str, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while True:
            self.notified.settimeout(max(0.01, end - time.monotonic()))
            if self.notified.recv(4096).decode() == wanted:
                return

    def write(self, message: dict[str, object]) -> None:
        os.write(self.near, json.dumps(message).encode() + b"\n")

    def read_until(self, kind: str, timeout_s: float = 60) -> list[dict[str, object]]:
        """Messages up to the first of a kind."""
        end, seen, messages = time.monotonic() + timeout_s, b"", []
        while True:
            assert select.select([self.near], [], [], max(0, end - time.monotonic()))[0], seen
            seen += os.read(self.near, 65536)
            *lines, seen = seen.split(b"\n")
            for line in lines:
                messages.append(json.loads(line))
                if messages[-1]["type"] == kind:
                    return messages

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.near, self._far):
            os.close(descriptor)
        self.notified.close()


@pytest.fixture
def agent(tiny_model: Path, tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, tiny_model)
    agent.expect_notice("READY=1")
    yield agent
    agent.clean_up()


def test_it_gets_ready_answers_and_ends(agent: Agent) -> None:
    agent.write({"type": "ask", "id": "q", "text": "Hello?"})
    *tokens, done = agent.read_until("done")
    assert "".join(str(token["text"]) for token in tokens) == done["result"]["text"]
    assert agent.end() == 0
    agent.expect_notice("STOPPING=1")
    log = agent.log.read_text()
    assert "ready:" in log and "request q of" in log and "Hello?" not in log and "Traceback" not in log


def test_the_watchdog_is_fed_while_idle_and_not_when_hung(agent: Agent) -> None:
    for _ in range(3):
        agent.expect_notice("WATCHDOG=1")
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    agent.notified.settimeout(0.01)
    with pytest.raises(TimeoutError):
        while True:
            agent.notified.recv(4096)
    agent.process.send_signal(signal.SIGCONT)
    agent.expect_notice("WATCHDOG=1")


def test_sigterm_lets_an_answer_finish(agent: Agent) -> None:
    agent.write({"type": "ask", "id": "q", "text": "Hello?"})
    agent.read_until("token")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.read_until("done")[-1]["result"]["reason"] == "length"
    assert agent.process.wait(60) == 0


def test_reload_takes_what_is_live_and_keeps_conversations(agent: Agent) -> None:
    agent.write({"type": "ask", "id": "1", "text": "Hello?", "session": "s"})
    first = agent.read_until("done")[-1]["result"]
    text = agent.config.read_text()
    agent.config.write_text(text.replace("max_tokens: 8", "max_tokens: 3").replace("threads: 1", "threads: 2"))
    agent.write({"type": "reload"})
    assert agent.read_until("ok")[-1]["notes"] == ["model.threads: takes effect at the next start"]
    agent.write({"type": "ask", "id": "2", "text": "And now?", "session": "s"})
    second = agent.read_until("done")[-1]["result"]
    assert second["tokens"]["generated"] == 3 and second["tokens"]["reused"] >= first["tokens"]["prompt"]


def test_a_bad_reload_changes_nothing_and_says_every_problem(agent: Agent) -> None:
    agent.config.write_text(agent.config.read_text() + "chatt: {}\nsampling: {top_p: 7}\n")
    agent.write({"type": "reload"})
    error = agent.read_until("error")[-1]
    assert "chatt" in str(error["message"]) and "sampling.top_p" in str(error["message"])
    agent.process.send_signal(signal.SIGHUP)
    agent.expect_notice("RELOADING=1")
    agent.write({"type": "ask", "id": "q", "text": "Hello?"})
    assert agent.read_until("done")[-1]["result"]["tokens"]["generated"] == 8
    assert "unknown key" in agent.log.read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("sampling: {temperature: hot}\n", "sampling.temperature"),
        ('mqtt: {url: "http://x"}\n', "mqtt.url"),
        ('mqtt: {url: "mqtt://x", password_file: /nowhere}\n', "mqtt.password_file"),
    ],
)
def test_a_bad_configuration_does_not_start(tiny_model: Path, tmp_path: Path, more: str, words: str) -> None:
    agent = Agent(tmp_path, tiny_model, more=more)
    try:
        assert agent.process.wait(60) == 78
        assert words in agent.log.read_text() and "Traceback" not in agent.log.read_text()
    finally:
        agent.clean_up()


WARM_UP = 200
"""Requests until every session is in use, every code page touched, and the heap has its size."""


def test_five_hundred_requests_over_both_transports_leave_no_memory_behind(tiny_model: Path, tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    agent = Agent(tmp_path, tiny_model, broker, "sampling: {temperature: 0.8}\n")
    try:
        agent.expect_notice("READY=1")
        warm = 0
        with MqttLink(f"{broker.url}/kiosk") as far:
            for i in range(WARM_UP + 500):
                if i == WARM_UP:
                    warm = pss(agent)
                text, session = f"question {i} {'word ' * (i % 40)}", {"session": f"s{i % 50}"} if i % 3 else {}
                if i % 2:
                    agent.write({"type": "ask", "id": f"q{i}", "text": text} | session)
                    assert agent.read_until("done")[-1]["id"] == f"q{i}"
                else:
                    far.send(Ask(id=f"q{i}", text=text, **session))
                    while not isinstance(message := far.receive(60), Answer):
                        assert isinstance(message, TokenText), message
                    assert message.id == f"q{i}"
            far.send(GetStatus())
            status = far.receive(60)
            assert isinstance(status, Status) and status.answered == WARM_UP + 500 and status.failed == 0
        assert abs(pss(agent) - warm) < 2 * 1024 * 1024
        assert agent.end() == 0
    finally:
        agent.clean_up()
        broker.kill()


def pss(agent: Agent) -> int:
    return Host().smaps_rollup(agent.process.pid)["Pss"]


class Cable:
    """Joins the agent's serial line to a device that a client can open."""

    def __init__(self, near: int) -> None:
        self._far, slave = os.openpty()
        tty.setraw(slave)
        self.device, self._slave = os.ttyname(slave), slave
        os.set_blocking(self._far, False)
        self._ends = {near: self._far, self._far: near}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        while not self._closed.is_set():
            for end in select.select(list(self._ends), [], [], 0.05)[0]:
                os.write(self._ends[end], os.read(end, 4096))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self._far)
        os.close(self._slave)


@pytest.mark.parametrize("way", ["serial", "mqtt"])
def test_a_person_chats_with_a_board_far_away(tiny_model: Path, tmp_path: Path, way: str) -> None:
    broker = Broker(tmp_path)
    agent = Agent(tmp_path, tiny_model, broker)
    cable = None
    try:
        agent.expect_notice("READY=1")
        if way == "serial":
            cable = Cable(agent.near)
            options = ["--serial", cable.device]
        else:
            options = ["--mqtt", f"{broker.url}/kiosk"]
        said = "Hello?\n/status\n/reset\nHello?\n/nonsense\n"
        done = subprocess.run(
            [*SKERRY, "chat", *options], input=said, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        answers = [line for line in lines if line and not line.startswith(("Type", "kiosk:", "(", "/"))]
        assert answers[0] == answers[1]
        assert any(line.startswith("kiosk: tiny, ") for line in lines) and "(a new conversation)" in lines
        assert "no such command" in done.stdout
    finally:
        if cable:
            cable.close()
        agent.clean_up()
        broker.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--serial", "/dev/nowhere"], "/dev/nowhere"),
        (["--mqtt", "mqtt://127.0.0.1:1/kiosk"], "127.0.0.1:1"),
        (["--mqtt", "mqtt://127.0.0.1"], "mqtt://broker/NODE"),
        (["--mqtt", "nonsense"], "mqtt://broker/NODE"),
    ],
)
def test_a_board_that_cannot_be_reached_is_one_line(options: list[str], words: str) -> None:
    done = subprocess.run([*SKERRY, "chat", *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
