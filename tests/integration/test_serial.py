"""Serial ports over pseudo-terminals: a real service and engine on one side, people and programs on the other."""

import asyncio
import json
import logging
import os
import random
import re
import termios
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry.config import Arena, Chat, Config, Flow, Parity, Port, Serial
from skerry.config import Service as ServiceSection
from skerry.host import Host
from skerry.service import Service
from skerry.transport.serial import SerialTransport
from tests.unit.test_engine import build

TIMEOUT_S = 60
LONG = 3000
"""Tokens of an answer that does not end by itself while a test looks at it."""


class Peer:
    """The other end of a serial line: the controlling side of a pseudo-terminal."""

    def __init__(self) -> None:
        self.fd, self._port = os.openpty()
        os.set_blocking(self.fd, False)
        self.path = os.ttyname(self._port)
        self.log = b""
        """All that ever came."""
        self._seen = 0
        self._news = asyncio.Event()
        self.read()

    def read(self) -> None:
        asyncio.get_running_loop().add_reader(self.fd, self._readable)

    def stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self.fd)

    def _readable(self) -> None:
        self.log += os.read(self.fd, 65536)
        self._news.set()

    async def opened(self) -> "Peer":
        """Wait until the board has opened its side, which it takes out of the cooked mode."""
        await eventually(lambda: not termios.tcgetattr(self.fd)[3] & termios.ECHO)
        return self

    async def write(self, *pieces: bytes | str) -> None:
        for piece in pieces:
            data = piece.encode() if isinstance(piece, str) else piece
            while data:
                try:
                    data = data[os.write(self.fd, data) :]
                except BlockingIOError:
                    await asyncio.sleep(0.001)

    async def until(self, pattern: bytes | str) -> str:
        """What came since the last call, up to the first match of a regular expression."""
        compiled = re.compile(pattern.encode() if isinstance(pattern, str) else pattern)
        async with asyncio.timeout(TIMEOUT_S):
            while not (match := compiled.search(self.log, self._seen)):
                self._news.clear()
                await self._news.wait()
        text, self._seen = self.log[self._seen : match.end()], match.end()
        return text.decode()

    async def json(self) -> Any:
        """The next line, which must be JSON."""
        return json.loads(await self.until(rb"\n"))

    async def tell(self, **message: Any) -> None:
        await self.write(json.dumps(message) + "\n")

    async def ask(self, **message: Any) -> tuple[list[Any], Any]:
        """The tokens and the message that ended the request."""
        await self.tell(type="ask", **message)
        return await self.answer()

    async def answer(self) -> tuple[list[Any], Any]:
        tokens = []
        while (reply := await self.json())["type"] == "token":
            tokens.append(reply)
        return tokens, reply

    def vanish(self) -> None:
        """As when an adapter is pulled out."""
        self.stop_reading()
        os.close(self.fd)
        os.close(self._port)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def board(
    model: Path,
    *devices: str | Path,
    max_tokens: int = 12,
    slots: int = 2,
    service: ServiceSection = ServiceSection(),  # noqa: B008
    **serial: Any,
) -> AsyncIterator[Service]:
    """A board whose ports are these devices."""
    engine = build(model, slots, 4096)
    engine._text.end_ids = frozenset()  # answers have the length that a test asks for
    config = Config(
        arena=Arena(slots=slots, max_tokens=4096),
        chat=Chat(max_tokens=max_tokens),
        service=service,
        serial=Serial(ports=tuple(Port(device=str(device)) for device in devices), **serial),
    )
    running = Service(engine, config, Host(), "rock", "tiny")
    transport = SerialTransport(config.serial, running, Host(), retry_s=0.02)
    transport.start()
    try:
        yield running
    finally:
        await transport.stop()
        await running.stop(TIMEOUT_S)
        engine.check_integrity()


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """A test that runs in an event loop, with the tiny model."""

    def run(tiny_model: Path) -> None:
        asyncio.run(test(tiny_model))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def shown(result: dict[str, Any]) -> str:
    """An answer as a person sees it."""
    text: str = result["text"]
    return text.replace("\n", "\r\n")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "skerry.transport.serial"]


# --- a program ---


@asynchronous
async def test_a_program_asks_and_gets_lines_of_json(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path):
        tokens, done = await peer.ask(id="a", text="Where does the sea end?")
        assert done["type"] == "done" and done["id"] == "a"
        assert [token["seq"] for token in tokens] == list(range(len(tokens)))
        assert "".join(token["text"] for token in tokens) == done["result"]["text"] != ""
        assert done["result"]["tokens"]["generated"] == 12

        silent, again = await peer.ask(text="Where does the sea end?", stream=False)
        assert silent == [] and again["result"]["text"] == done["result"]["text"]

        _, first = await peer.ask(session="s", text="One.")
        _, second = await peer.ask(session="s", text="Two.")
        assert second["session"] == "s" and second["result"]["tokens"]["reused"] > first["result"]["tokens"]["prompt"]
        await peer.tell(type="sessions")
        assert [(s["session"], s["turns"]) for s in (await peer.json())["sessions"]] == [("s", 4)]
        await peer.tell(type="reset", session="s")
        assert await peer.json() == {"type": "ok", "did": "reset", "notes": ["s"]}
        await peer.tell(type="limits")
        assert (await peer.json())["max_tokens"] == 12
        await peer.tell(type="status")
        status = await peer.json()
        assert (status["type"], status["node"], status["state"], status["answered"]) == ("status", "rock", "idle", 4)


@asynchronous
async def test_an_answer_is_cancelled(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, max_tokens=LONG):
        await peer.tell(type="ask", id="a", text="Tell me all.")
        assert (await peer.json())["type"] == "token"
        await peer.tell(type="cancel", id="a")
        _, done = await peer.answer()
        assert done["result"]["reason"] == "cancelled"
        await peer.tell(type="cancel", id="a")
        assert await peer.json() == {
            "type": "error",
            "id": "a",
            "code": "unknown",
            "message": "no request a is under way",
        }


@asynchronous
async def test_what_is_wrong_with_a_programs_line_is_one_error(model: Path) -> None:
    peer = Peer()
    limits = ServiceSection(per_client=1, prompt_bytes=256)
    async with board(model, peer.path, max_tokens=LONG, service=limits, line_bytes=1000):
        for line, code in (
            (b"{", "bad_message"),
            (b'{"type": "unheard of"}', "bad_message"),
            (b'{"type": "ask", "text": "\xff"}', "bad_message"),
            (b'{"type": "ask", "text": "\x00"}', "bad_message"),
            (b'{"type": "ask", "text": "a", "textt": "b"}', "bad_message"),
            (b'{"type": "ask", "text": "' + b"x" * 300 + b'"}', "too_large"),
            (b'{"type": "ask", "text": "' + b"x" * 3000 + b'"}', "too_large"),
        ):
            await peer.write(line + b"\r\n")
            reply = await peer.json()
            assert (reply["type"], reply["code"]) == ("error", code), reply
        await peer.tell(type="ask", id="a", text="Tell me all.")
        await peer.json()
        await peer.tell(type="ask", id="b", text="And me.", stream=False)
        while (reply := await peer.json())["type"] == "token":
            pass
        assert (reply["id"], reply["code"]) == ("b", "busy") and reply["retry_after_s"] > 0


@asynchronous
async def test_characters_split_over_reads_and_writes_stay_whole(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, max_tokens=200):
        question = {"type": "ask", "text": "Grüße, 你好 🦭?", "sampling": {"temperature": 10, "seed": 3}}
        line = json.dumps(question, ensure_ascii=False).encode() + b"\n"
        await peer.write(*(line[at : at + 1] for at in range(len(line))))
        tokens, done = await peer.answer()  # each line is decoded strictly
        text = done["result"]["text"]
        assert "".join(token["text"] for token in tokens) == text and not text.isascii()
        await peer.tell(type="ask", text=question["text"], sampling=question["sampling"], stream=False)
        assert (await peer.json())["result"]["text"] == text


# --- a person ---


async def talk(peer: Peer, typed: str) -> str:
    """Type a line; what is shown up to the next prompt, without the line's own echo and the prompt."""
    await peer.write(typed, "\r")
    return (await peer.until(r"\r\n(?:.*\r\n)*?> $")).removeprefix(f"{typed}\r\n").removesuffix("> ")


@asynchronous
async def test_a_person_talks(model: Path) -> None:
    peer, program = Peer(), Peer()
    async with board(model, peer.path, program.path):
        _, first = await program.ask(text="Where does the sea end?")
        await peer.write("\r")
        assert await peer.until("> ") == "> "
        cut = "(cut off after 12 tokens)\r\n"
        assert await talk(peer, "Where does the sea end?") == f"{shown(first['result'])}\r\n{cut}"
        assert (await talk(peer, "And then?")).endswith(cut)
        assert "/reset" in await talk(peer, "/help")
        assert re.search(r"rock: idle, tiny.*\r\nup .*3 answered, 0 failed\r\n", await talk(peer, "/status"))
        assert "at most 12 tokens" in await talk(peer, "/limits")
        assert await talk(peer, "/cancel") == "(there is no answer to cancel)\r\n"
        assert await talk(peer, "/rest") == "(/rest: no such command; /help lists them)\r\n"
        assert await talk(peer, "/reset") == "(a new conversation)\r\n"
        assert await talk(peer, "/reset") == "(there is no conversation to forget)\r\n"
        assert await talk(peer, "Where does the sea end?") == f"{shown(first['result'])}\r\n{cut}"
        assert await talk(peer, "x" * 40_000) == ("(the prompt has 40000 bytes, the limit is 32768; shorten it)\r\n")


@asynchronous
async def test_a_person_edits(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path):
        await peer.write(b"/stop\x17/help! \xf0\x9f", b"\xa6\xad\x7f\x7f\x7f")
        assert await peer.until("\b \b\b \b\b \b\b \b$") == ("> /stop" + "\b \b" * 5 + "/help! 🦭" + "\b \b" * 4)
        await peer.write("\r")
        assert "what the board is doing" in await peer.until("> ")
        await peer.write("half a line\x03")
        assert await peer.until(r"\n> ") == "half a line^C\r\n> "
        await peer.write(b"\x1b[A\x04\x00/cancel\r")
        assert await peer.until(r"\n> ") == "/cancel\r\n(there is no answer to cancel)\r\n> "


@asynchronous
async def test_ctrl_c_ends_an_answer_and_what_was_typed_comes_after_it(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, max_tokens=LONG):
        for stop in ("\x03", "/cancel\r"):
            await peer.write("Tell me all.\r")
            await peer.until(r"all.\r\n.{10}")
            await peer.write("/limits\r", stop, "never")
            assert await peer.until(r"\(cancelled\)\r\n> never$")
            await peer.write("\x15")
            await peer.until(r"(?:\x08 \x08){5}")
        await peer.write("Tell me all.\r")
        await peer.until(r"all.\r\n.{10}")
        async with asyncio.timeout(TIMEOUT_S):
            await peer.write("/lim", "its\r", "next\x7f")
            await peer.write("\x03")
        shown_then = await peer.until(r"\(cancelled\)\r\n> ")
        assert "lim" not in shown_then


@asynchronous
async def test_lines_typed_during_an_answer_are_served_in_turn(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, max_tokens=100):
        await peer.write("One?\r", *(f"/no{number}\r" for number in range(10)), "par")
        text = await peer.until(r"> par")
        assert "(2 of the lines typed meanwhile were dropped)" in text
        served = re.findall(r"> (/no\d)\r\n\((/no\d): no such command", text)
        assert served == [(f"/no{number}", f"/no{number}") for number in range(2, 10)]


# --- both on one port ---


@asynchronous
async def test_a_person_and_a_program_share_a_port(model: Path) -> None:
    peer, other = Peer(), Peer()
    async with board(model, peer.path, other.path, max_tokens=60):
        _, expected = await other.ask(text="Where does the sea end?")
        await peer.write("Where does the sea end?\r")
        await peer.until(r"end\?\r\n.{5}")
        await peer.tell(type="ask", id="m", text="And the sky?")
        await peer.tell(type="status")
        await peer.until(r"\n\r?> ")
        await eventually(lambda: b'"done"' in peer.log)
        lines = peer.log.decode().split("\n")
        messages = [json.loads(line) for line in lines if line.startswith("{")]
        assert {message.get("id", "m") for message in messages} == {"m"}
        assert [message["type"] for message in messages if message["type"] != "token"] == ["status", "done"]
        # Without the JSON and the breaks before it, the person's answer is whole.
        text = re.sub(r"(?:\r\n)?\{[^\n]*\n\r?", "", peer.log.decode())
        assert shown(expected["result"]).replace("\r\n", "") in text.replace("\r\n", "")

        await peer.write("/lim")
        await peer.until("/lim")
        await peer.tell(type="limits")  # is taken for the rest of the line: a program begins with Ctrl-U
        await peer.until(r"no such command[^\n]*\n> ")
        await peer.write("/lim")
        await peer.until("/lim")
        await peer.write('\x15{"type": "limits"}\n')
        assert json.loads((await peer.until(r"\}\n")).rpartition("\n{")[2].join(["{", ""]))["type"] == "limits"
        await peer.write("/")
        assert await peer.until("/") == "\r> /"


@asynchronous
async def test_a_program_cannot_touch_a_persons_question(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, max_tokens=LONG):
        await peer.write("Tell me all.\r")
        await peer.until(r"all.\r\n.{10}")
        await peer.tell(type="cancel", id="chat/1")
        assert json.loads((await peer.until(r"\{.*\}\n")).splitlines()[-1])["code"] == "bad_message"
        await peer.write("\x03")
        await peer.until(r"\(cancelled\)\r\n> ")


# --- several ports, and bad ones ---


@asynchronous
async def test_ports_have_their_own_sessions_and_answers(model: Path) -> None:
    peers = [Peer() for _ in range(3)]
    async with board(model, *(peer.path for peer in peers)):
        answers = await asyncio.gather(*(peer.ask(id="same", session="s", text="Hello?") for peer in peers))
        assert len({done["result"]["text"] for _, done in answers}) == 1
        await peers[0].tell(type="reset", session="s")
        assert (await peers[0].json())["type"] == "ok"
        for peer, sessions in zip(peers, (0, 1, 1), strict=True):
            await peer.tell(type="sessions")
            assert len((await peer.json())["sessions"]) == sessions


@asynchronous
async def test_after_a_megabyte_of_noise_a_question_is_answered(model: Path) -> None:
    peer, quiet = Peer(), Peer()
    noise = random.Random(11).randbytes(1_000_000)
    async with board(model, peer.path, quiet.path, max_tokens=2):
        writing = asyncio.create_task(peer.write(noise, "\n\x15"))
        _, done = await quiet.ask(text="Are you there?")
        assert done["type"] == "done"
        await writing
        await peer.tell(type="ask", id="after-noise", text="Are you there?", stream=False)
        line = await peer.until(r'\n\{"type":"done","id":"after-noise"[^\n]*\n')
        assert json.loads(line.splitlines()[-1])["result"]["text"] == done["result"]["text"]
        await peer.write("Are you there?\r")
        await peer.until(r"> Are you there\?\r\n[^>]*> ")


@asynchronous
async def test_lines_beyond_the_limit_are_answered_once(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, line_bytes=1000):
        await peer.write("{", "x" * 200_000, "\n")
        reply = await peer.json()
        assert (reply["code"], reply["message"]) == ("too_large", "the line has more than 1000 bytes")
        await peer.write("y" * 200_000, "\r")
        text = await peer.until(r"\n> ")
        assert text.endswith("\r\n(this line had more than 1000 bytes and was dropped)\r\n> ") and len(text) < 2000
        await peer.write(b"\xff\xfe\r\x80\r\x81\r")
        assert await peer.until(r"\n> ") == "\r\n(this line was not text in UTF-8 and was dropped)\r\n> "
        await peer.tell(type="limits")
        assert json.loads((await peer.until(r"\}\n")).splitlines()[-1])["type"] == "limits"


def test_a_peer_that_stops_reading_holds_up_nobody(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    paths: list[str] = []

    async def test() -> None:
        peer, person, other = Peer(), Peer(), Peer()
        paths.extend([peer.path, person.path])
        async with board(tiny_model, peer.path, person.path, other.path, max_tokens=LONG, buffer_bytes=4096) as service:
            for stuck in (peer, person):
                stuck.stop_reading()
            await peer.tell(type="ask", id="a", text="Tell me all.")
            await person.write("/help\r" * 400, "Tell me all.\r")
            # Their buffers fill, their requests end, and the engine is free again.
            _, done = await other.ask(text="Are you there?", max_tokens=5)
            assert done["result"]["tokens"]["generated"] == 5
            await eventually(lambda: service.status().answered == 3)

            peer.read()
            line = json.loads((await peer.until(r'\{"type":"error"[^\n]*\n')).splitlines()[-1])
            assert (line["code"], line["message"][:15]) == ("failed", "output was lost")
            for line in peer.log.splitlines():
                assert json.loads(line)["type"] in ("token", "error")
            _, done = await peer.ask(id="b", text="Are you there?", max_tokens=5)
            assert done["id"] == "b"

            person.read()
            await person.until(r"\r\n\(some output was lost because it was not read\)\r\n")
            await person.write("/cancel\r")
            await person.until(r"> /cancel\r\n\(there is no answer to cancel\)\r\n> ")

    asyncio.run(test())
    assert {line.split(":")[0] for line in logged(caplog) if "does not read" in line} == set(paths)


# --- ports that go and come ---


def test_a_port_that_goes_and_comes_back(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    device = tmp_path / "ttyUSB0"

    async def test() -> None:
        other = Peer()
        async with board(tiny_model, device, other.path, max_tokens=LONG) as service:
            for turn in range(3):
                assert (await other.ask(text="Hello?", max_tokens=2))[1]["type"] == "done"  # absent ports do not matter
                peer = Peer()
                device.symlink_to(peer.path)
                await peer.opened()
                await peer.tell(type="ask", id="a", text="Tell me all.")
                await peer.write("Tell me all.\r")
                await peer.until(r"\}\n")
                await eventually(lambda: service.status().answering == 2)
                device.unlink()
                peer.vanish()
                await eventually(lambda turn=turn: service.status().answered == 3 * (turn + 1))

    asyncio.run(test())
    lines = [line.removeprefix(f"{device}: ") for line in logged(caplog) if line.startswith(str(device))]
    # A read finds the line hung up, a write an input/output error: whichever comes first.
    kinds = [re.sub(r" \((hung up|Input/output error)\)", "", line) for line in lines]
    absent, back = "cannot be opened yet: No such file or directory", "lost; it is opened again when it is back"
    assert kinds == [absent, *["open at 115200 baud", back] * 3]


def test_what_cannot_be_opened_is_logged_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    async def test() -> None:
        peer = Peer()
        (tmp_path / "same").symlink_to(peer.path)
        async with board(tiny_model, peer.path, tmp_path / "same", tmp_path / "file", tmp_path):
            assert (await peer.ask(text="Hello?", max_tokens=30))[1]["type"] == "done"
            await eventually(lambda: len(logged(caplog)) >= 3)

    asyncio.run(test())
    same, file, folder = logged(caplog)
    assert same == f"{tmp_path}/same: cannot be opened yet: another program uses it"
    assert "Inappropriate ioctl" in file
    assert folder == f"{tmp_path}: cannot be opened yet: Is a directory"


def test_the_kernels_console_is_told(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    console = tmp_path / "sys/class/tty/console/active"
    console.parent.mkdir(parents=True)

    async def test() -> None:
        peer = Peer()
        console.write_text(f"tty0 {Path(peer.path).name}\n")
        service = Service(build(tiny_model), Config(), Host(), "rock", "tiny")
        transport = SerialTransport(Serial(ports=(Port(device=peer.path),)), service, Host(tmp_path))
        transport.start()
        await peer.write("/help\r")
        await peer.until("> $")
        await transport.stop()
        await service.stop(TIMEOUT_S)

    asyncio.run(test())
    (line,) = logged(caplog)
    assert "is the kernel's console" in line


def test_the_line_is_set_as_configured(tiny_model: Path) -> None:
    async def settings(port: Port, peer: Peer) -> list[Any]:
        service = Service(build(tiny_model), Config(), Host(), "rock", "tiny")
        transport = SerialTransport(Serial(ports=(port,)), service, Host())
        transport.start()
        found = termios.tcgetattr(peer.fd)
        await transport.stop()
        await service.stop(TIMEOUT_S)
        return found

    async def test() -> None:
        peer = Peer()
        iflag, _, cflag, lflag, ispeed, ospeed, _ = await settings(
            Port(device=peer.path, baud=9600, parity=Parity.ODD, flow=Flow.XONXOFF), peer
        )
        assert ispeed == ospeed == termios.B9600
        assert iflag & termios.IXON and not cflag & termios.CRTSCTS and not lflag & (termios.ECHO | termios.ICANON)
        iflag, _, cflag, *_ = await settings(Port(device=peer.path, flow=Flow.RTSCTS), peer)
        assert cflag & termios.CRTSCTS and not iflag & termios.IXON

    asyncio.run(test())


@asynchronous
async def test_stopping_tells_who_waits(model: Path) -> None:
    peer = Peer()
    async with board(model, peer.path, slots=1, max_tokens=400) as service:
        await peer.tell(type="ask", id="a", text="Tell me all.", stream=False)
        await peer.tell(type="ask", id="b", text="Me too.")
        await eventually(lambda: service.status().waiting == 1)
        await service.stop(TIMEOUT_S)
    assert [(reply["type"], reply["id"]) for reply in (await peer.json(), await peer.json())] == [
        ("error", "b"),
        ("done", "a"),
    ]
