"""The parts of the MQTT transport that need no broker."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.config import Mqtt
from skerry.errors import ConfigError
from skerry.protocol import Part, parse_outgoing
from skerry.transport.broker import Backoff
from skerry.transport.door import Door
from skerry.transport.mqtt import parts
from skerry.transport.outbox import Outbox, Packet, Weight
from tests.broker import Authority

HOURS_S = 6 * 3600


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [lambda: 0.0, random.random])
def test_no_minute_has_more_than_4_attempts(seed: int, spread: Callable[[], float]) -> None:
    """Whatever the broker does: refuse, break, throw out, hold for a while."""
    broker = random.Random(seed)
    backoff = Backoff(spread=spread)
    now, attempts = 0.0, []
    while now < HOURS_S:
        attempts.append(now)
        lasted_s = broker.choice([0.0, 0.0, 0.1, 30.0, 59.9, 60.0, 61.0, 4000.0])
        now += lasted_s + backoff.next_s(lasted_s, taken_over=bool(lasted_s) and broker.random() < 0.3)
    assert all(fifth - first >= 60 for first, fifth in zip(attempts, attempts[4:], strict=False))


def test_backoff_grows_to_its_limit_and_begins_anew_after_a_stable_connection() -> None:
    backoff = Backoff(spread=lambda: 0.0)
    assert [backoff.next_s(0.0) for _ in range(7)] == [5, 10, 20, 40, 80, 120, 120]
    assert backoff.next_s(59.0) == 120
    assert [backoff.next_s(60.0), backoff.next_s(0.0)] == [5, 10]
    assert [backoff.next_s(100.0, taken_over=True) for _ in range(8)] == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert backoff.next_s(3600.0, taken_over=True) == 60
    for _ in range(10_000):
        assert backoff.next_s(0.0) <= 120


def packet(payload: bytes, weight: Weight) -> Packet:
    return Packet(topic="t", payload=payload, weight=weight)


def drained(outbox: Outbox) -> list[bytes]:
    return [queued.packet.payload for queued in iter(outbox.take, None)]


def test_a_full_outbox_drops_pieces_then_reports_and_never_replies() -> None:
    outbox = Outbox(4)
    for payload, weight in (
        (b"reply1", Weight.REPLY),
        (b"report1", Weight.REPORT),
        (b"piece1", Weight.PIECE),
        (b"piece2", Weight.PIECE),
        (b"piece3", Weight.PIECE),
        (b"reply2", Weight.REPLY),
    ):
        outbox.put(packet(payload, weight))
    assert (len(outbox), outbox.dropped, outbox.full) == (4, 2, False)
    for number in range(3, 6):
        outbox.put(packet(b"reply%d" % number, Weight.REPLY))
    assert (len(outbox), outbox.dropped, outbox.full) == (5, 4, True)
    assert drained(outbox) == [b"reply1", b"reply2", b"reply3", b"reply4", b"reply5"]
    assert not outbox.full


def test_what_was_not_acknowledged_comes_first_again_but_not_for_ever() -> None:
    outbox = Outbox(4)
    for payload in (b"1", b"2", b"3"):
        outbox.put(packet(payload, Weight.REPLY))
    for _ in range(2):
        sent = [outbox.take(), outbox.take()]
        outbox.give_back(queued for queued in sent if queued)
        assert len(outbox) == 3
    sent = [outbox.take()]
    outbox.give_back(queued for queued in sent if queued)
    assert drained(outbox) == [b"2", b"3"]
    assert outbox.dropped == 1


@pytest.mark.parametrize("room", [150, 151, 152, 153, 1000])
def test_parts_are_whole_characters_that_fit_and_join_to_the_message(room: int) -> None:
    line = ('{"text": "海🌊\\n\\"' + "👩‍🚀é\\\\" * 100 + '"}').encode()
    pieces = parts(line, "q1", room)
    assert all(len(piece) <= room for piece in pieces)
    messages = [parse_outgoing(piece) for piece in pieces]
    assert all(isinstance(message, Part) for message in messages)
    assert [(message.part, message.of) for message in messages] == [(i, len(pieces)) for i in range(len(pieces))]
    assert "".join(message.text for message in messages).encode() == line
    assert parts(line, "q1", 60) == []


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqtt://broker", ("broker", 1883)),
        ("mqtt://broker:1884/", ("broker", 1884)),
        ("mqtts://broker", ("broker", 8883)),
        ("mqtt://[fe80::1]:1", ("fe80::1", 1)),
    ],
)
def test_addresses(url: str, address: tuple[str, int]) -> None:
    door = Door(Mqtt(url=url))
    assert (door.host, door.port) == address
    assert (door.context is not None) == url.startswith("mqtts")


@pytest.mark.parametrize(
    "url",
    ["broker", "http://broker", "mqtt://", "mqtt://:1883", "mqtt://b:x", "mqtt://b:70000", "mqtt://b/path", "mqtt://u:p@b",
     "mqtt://[::1", "mqtt://b?x=1"],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        Door(Mqtt(url=url))
    assert [problem.partition(": ")[0] for problem in error.value.problems] == ["mqtt.url"]


def test_every_problem_of_the_files_is_told(tmp_path: Path) -> None:
    key, password, authority = tmp_path / "key", tmp_path / "password", tmp_path / "ca"
    for path in (key, password, authority):
        path.write_text("nonsense")
        path.chmod(0o640)
    with pytest.raises(ConfigError) as error:
        Door(
            Mqtt(
                url="mqtts://broker",
                password_file=str(password),
                ca_file=str(authority),
                cert_file=str(tmp_path / "cert"),
                key_file=str(key),
            )
        )
    first, second, third = error.value.problems
    assert first == f"mqtt.password_file: {password}: others than its owner can read it; run: chmod 600 {password}"
    assert second.startswith(f"mqtt.ca_file: {authority}: ")
    assert third == f"mqtt.key_file: {key}: others than its owner can read it; run: chmod 600 {key}"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"url": "mqtt://b", "ca_file": "x"}, "ca_file"),
        ({"url": "mqtts://b", "key_file": "x"}, "key_file"),
        ({"url": "mqtts://b", "cert_file": "absent"}, "cert_file"),
        ({"url": "mqtt://b", "password_file": "absent"}, "password_file"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Door(Mqtt(**settings))
    assert [problem.partition(": ")[0] for problem in error.value.problems] == [f"mqtt.{key}"]


def test_the_password_is_a_file_without_its_newline(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(" se cret \n")
    password.chmod(0o400)
    assert Door(Mqtt(url="mqtt://b", username="u", password_file=str(password))).password == " se cret "


def test_a_certificate_and_its_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("board")
    both = tmp_path / "both.pem"
    both.touch(mode=0o600)
    both.write_text(certificate.read_text() + key.read_text())
    for settings in ({"cert_file": str(certificate), "key_file": str(key)}, {"cert_file": str(both)}):
        assert Door(Mqtt(url="mqtts://b", ca_file=str(authority.certificate), **settings)).context
    with pytest.raises(ConfigError, match=r"mqtt\.key_file"):
        Door(Mqtt(url="mqtts://b", cert_file=str(authority.certificate), key_file=str(key)))  # not its certificate
