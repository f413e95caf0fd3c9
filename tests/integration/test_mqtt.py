"""The MQTT transport against a real mosquitto, with a real service over a tiny model."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.config import Chat, Mqtt, Service
from skerry.engine import Engine
from skerry.host import Host
from skerry.transport.broker import LARGEST_PACKET
from tests.broker import Authority, Broker, until
from tests.conftest import ROOT
from tests.mqtt_board import NODE, SLOTS, TIMEOUT_S, Board, Got, Peer, Stepwise, text_of, tiny_engine

SAID = '海に岩がある。 The sea 🌊🪨 — and 👩‍🚀 "quoted\\" \n'
ASK, CANCEL, REPLIES, FLEET = (
    f"skerry/{NODE}/ask",
    f"skerry/{NODE}/cancel",
    f"skerry/{NODE}/reply/#",
    "skerry/fleet/ask",
)
OWN = f"skerry/{NODE}/#"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = tiny_engine(tiny_model)
    yield engine
    engine.check_integrity()


@pytest.fixture(scope="module")
def speaker(tiny_model: Path) -> Engine:
    """Says SAID many times, whatever it is asked."""
    return tiny_engine(tiny_model, dictate=SAID * 30)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Makes brokers: lines of mosquitto.conf -> Broker."""
    made: list[Broker] = []

    def make(*lines: str) -> Broker:
        made.append(Broker(tmp_path / f"broker{len(made)}", *lines))
        return made[-1]

    yield make
    for broker in made:
        broker.kill()


@pytest.fixture
def broker(brokers: Callable[..., Broker]) -> Broker:
    return brokers()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Makes clients, which are closed in the end."""
    made: list[Peer] = []

    def make(broker: Broker, *topics: str, **options: Any) -> Peer:
        made.append(Peer(broker.port, *topics, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


Peers = Callable[..., Peer]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_an_answer_streams_to_the_response_topic_with_its_correlation(
    engine: Engine, broker: Broker, peers: Peers, qos: int
) -> None:
    with Board(engine, Mqtt(url=broker.url, qos=qos)):
        peer = peers(broker, OWN, "app/7/in")
        peer.online()
        peer.ask({"id": "q1", "text": "Where does the sea end?", "max_tokens": 20}, "app/7/in", correlation=b"\x00c1")
        answer = peer.answer("q1")
        assert len(answer) > 2
        assert text_of(answer)
        assert {(got.topic, got.correlation, got.retain) for got in answer} == {("app/7/in", b"\x00c1", False)}


def test_plain_text_is_a_question_and_the_reply_topic_has_its_id(speaker: Engine, broker: Broker, peers: Peers) -> None:
    with Board(speaker, Mqtt(url=broker.url), chat=Chat(max_tokens=4000)):
        peer = peers(broker, OWN)
        peer.online()
        peer.publish(ASK, "你好，🌊?")
        first = peer.wait(lambda got: "/reply/" in got.topic)
        request_id = first.message["id"]
        answer = [first, *peer.answer(request_id)]
        assert text_of(answer) == SAID * 30
        assert {got.topic for got in answer} == {f"skerry/{NODE}/reply/{request_id}"}


@pytest.mark.parametrize("form", ["q1", ' {"type": "cancel", "id": "q1"}'])
def test_cancel(engine: Engine, broker: Broker, peers: Peers, form: str) -> None:
    held = Stepwise(engine, steps=5)
    with Board(held, Mqtt(url=broker.url)):
        peer = peers(broker, OWN, "mine")
        peer.online()
        peer.ask({"id": "q1", "text": "Count."}, "mine")
        peer.wait(lambda got: got.topic == "mine")
        peer.publish(CANCEL, form)
        assert peer.wait(lambda got: "/reply/" in got.topic).message["code"] == "unknown"  # not this client's
        peer.publish(CANCEL, form, "mine")
        peer.publish(ASK, {"type": "limits"}, "mine")
        peer.wait(lambda got: got.topic == "mine" and got.message["type"] == "limits")  # so the cancel was read
        held.go()
        assert peer.answer("q1")[-1].message["result"]["reason"] == "cancelled"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"type": "status"}, "status"),
        ({"type": "sessions"}, "sessions"),
        ({"type": "limits"}, "limits"),
        ({"type": "reset"}, "ok"),
        ({"type": "compact"}, "error"),
        ({"type": "reload"}, "error"),
        ({"type": "ask"}, "error"),
        ({"type": "ask", "id": "q1", "text": "x", "messages": []}, "error"),
        ({"type": "ask", "id": "a/+/#", "text": "x"}, "error"),
        ({"type": "cancel", "id": "q1"}, "error"),
        ({"type": "no such"}, "error"),
        ('{"type": "ask", "id": "q1", "text": "\\ud800"}', "error"),
        ("[" * 100_000, "error"),
        ('{"a":' * 100_000, "error"),
        ("", "error"),
        (b"\xff\xfe", "error"),
    ],
)
def test_the_ask_topic_takes_every_message(board_for_messages: Peer, message: Any, kind: str) -> None:
    peer = board_for_messages
    peer.publish(ASK, message, "mine")
    if kind == "error" and isinstance(message, str) and message.startswith("["):  # a question, though a silly one
        assert peer.wait(lambda got: got.topic == "mine").message["code"] == "too_large"
        return
    assert peer.wait(lambda got: got.topic == "mine").message["type"] == kind
    peer.publish(ASK, message)
    got = peer.wait(lambda got: "/reply/" in got.topic)
    request_id = got.message.get("id")
    assert got.topic == f"skerry/{NODE}/reply/{'-' if request_id in (None, 'a/+/#') else request_id}"


@pytest.fixture(scope="module")
def board_for_messages(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A client of a board that many tests use, with an engine of its own."""
    broker = Broker(tmp_path_factory.mktemp("broker"))
    try:
        with Board(tiny_engine(tiny_model), Mqtt(url=broker.url), service=Service(prompt_bytes=1024)):
            peer = Peer(broker.port, OWN, "mine")
            peer.online()
            yield peer
            peer.close()
    finally:
        broker.kill()


@pytest.mark.parametrize(
    ("topic", "correlation"),
    [
        ("$SYS/broker", None),
        (f"skerry/{NODE}/status", None),
        (ASK, None),
        ("a\u2028b", None),
        ("x" * 257, None),
        ("海" * 100, None),
        ("mine", b"x" * 257),
    ],
    ids=["system", "status", "ask", "unprintable", "long", "long in bytes", "long correlation"],
)
def test_response_topics_that_are_refused(board_for_messages: Peer, topic: str, correlation: bytes | None) -> None:
    peer = board_for_messages
    peer.ask({"id": "q1", "text": "Where?"}, topic, correlation=correlation)
    got = peer.wait(lambda got: got.message["type"] == "error")
    assert (got.topic, got.message["code"]) == (f"skerry/{NODE}/reply/-", "bad_message")


def test_a_prompt_beyond_the_limit_is_refused(board_for_messages: Peer) -> None:
    board_for_messages.ask({"id": "q1", "text": "海" * 400}, "mine")
    [got] = board_for_messages.answer("q1")
    assert (got.topic, got.message["code"]) == ("mine", "too_large")


def test_four_clients_at_once_each_get_their_own_whole_answer(engine: Engine, broker: Broker, peers: Peers) -> None:
    questions = [f"What is {number} and {number}?" for number in range(4)]
    with Board(engine, Mqtt(url=broker.url)):
        peer = peers(broker, OWN, "alone")
        peer.online()
        expected = []
        for question in questions:
            peer.ask({"id": "q", "text": question, "max_tokens": 40}, "alone")
            expected.append(text_of(peer.answer("q")))
        clients = [peers(broker, f"client/{number}") for number in range(4)]
        for number, client in enumerate(clients):
            question = {"id": "same", "text": questions[number], "max_tokens": 40}
            client.ask(question, f"client/{number}", correlation=b"%d" % number)
        for number, client in enumerate(clients):
            answer = client.answer("same")
            assert text_of(answer) == expected[number]
            assert {got.correlation for got in answer} == {b"%d" % number}
    assert len(set(expected)) == 4


def test_retained_commands_are_ignored(engine: Engine, broker: Broker, peers: Peers) -> None:
    peer = peers(broker, OWN)
    peer.ask({"id": "before", "text": "Old?"}, retain=True)
    with Board(engine, Mqtt(url=broker.url)):
        peer.event("retained_ignored")
        peer.ask({"id": "live", "text": "Old?"}, retain=True)
        peer.publish(CANCEL, "new", retain=True)
        peer.ask({"id": "new", "text": "New?", "max_tokens": 4})
        replies = []
        for got in peer.messages():
            if "/reply/" in got.topic:
                replies.append(got.message)
                if replies[-1]["type"] == "done":
                    break
        assert {reply["id"] for reply in replies} == {"new"}
        assert replies[-1]["result"]["reason"] != "cancelled"


def test_garbage_on_every_topic(engine: Engine, broker: Broker, peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    noise = random.Random(0)
    with Board(engine, Mqtt(url=broker.url, fleet=True)):
        peer = peers(broker, REPLIES, f"skerry/{NODE}/status")
        peer.online()
        for topic in (ASK, CANCEL, FLEET):
            for size in (1, 100, 10_000, 1_000_000):
                peer.publish(topic, b"\xff" + noise.randbytes(size - 1))
                got = peer.wait(lambda got: "/reply/" in got.topic)
                assert got.message["code"] == ("too_large" if size == 1_000_000 else "bad_message")
            peer.publish(topic, b"{" + noise.randbytes(1000))
            assert peer.wait(lambda got: "/reply/" in got.topic).message["code"] == "bad_message"
        peer.publish(FLEET, {"type": "reset"})
        assert peer.wait(lambda got: "/reply/" in got.topic).message["code"] == "bad_message"
        peer.publish(ASK, bytes(LARGEST_PACKET + 1))  # the broker keeps it
        peer.ask({"id": "q1", "text": "Still there?", "max_tokens": 4})
        assert text_of(peer.answer("q1"))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("answered", ["after", "away"])
def test_the_broker_dies_in_mid_answer(
    engine: Engine, brokers: Callable[..., Broker], peers: Peers, tmp_path: Path, answered: str
) -> None:
    """Nothing is lost, whether the answer goes on after the reconnect or ends while the broker is away."""
    held = Stepwise(engine, steps=8)
    broker = brokers("persistence true", f"persistence_location {tmp_path}/")
    with Board(held, Mqtt(url=broker.url)) as board:
        peer = peers(broker, OWN, client_id="asker", keep_s=3600)
        peer.online()
        peer.ask({"id": "q1", "text": "Where does the sea end?", "max_tokens": 60})
        first = peer.wait(lambda got: "/reply/" in got.topic)
        broker.save(tmp_path)
        broker.kill()
        assert peer.ended.wait(TIMEOUT_S)
        if answered == "away":
            held.go()
            until(lambda: board.state == "idle", "the answer ends")
        broker.start()
        peer.connect()
        seen = [first]
        for got in peer.messages():
            if got.topic.endswith("/event"):
                assert got.message["event"] == "reconnected"
                held.go()
            elif "/reply/" in got.topic:
                seen.append(got)
                if got.message["type"] == "done":
                    break
        assert text_of(without_repeats(seen))
        peer.ask({"id": "q2", "text": "Are you back?", "max_tokens": 4})
        assert text_of(peer.answer("q2"))


def without_repeats(answer: list[Got]) -> list[Got]:
    """What was not acknowledged when the connection broke may come twice; `seq` tells."""
    return list({got.message.get("seq", "end"): got for got in answer}.values())


def test_status_is_retained_and_a_killed_board_is_offline(tiny_model: Path, broker: Broker, peers: Peers) -> None:
    peer = peers(broker, f"skerry/{NODE}/status")
    command = [sys.executable, "-m", "tests.mqtt_board", str(tiny_model), broker.url]
    with subprocess.Popen(command, cwd=ROOT) as process:
        status = peer.online().message
        assert (status["type"], status["node"], status["state"]) == ("status", NODE, "idle")
        late = peers(broker, f"skerry/{NODE}/status")
        assert late.online().retain
        process.kill()
        assert peer.wait(lambda got: got.message["state"] == "offline").message["node"] == NODE
    late = peers(broker, f"skerry/{NODE}/status")
    assert late.wait(lambda got: got.retain).message["state"] == "offline"


def test_the_status_follows_the_state_and_stop_says_offline(engine: Engine, broker: Broker, peers: Peers) -> None:
    held = Stepwise(engine, steps=3)
    with Board(held, Mqtt(url=broker.url)):
        peer = peers(broker, OWN)
        peer.online()
        peer.ask({"id": "q1", "text": "Where?", "max_tokens": 4})
        peer.wait(lambda got: got.topic.endswith("/status") and got.message["state"] == "busy")
        held.go()
        peer.wait(lambda got: got.topic.endswith("/status") and got.message["state"] == "idle")
    last = peer.wait(lambda got: got.topic.endswith("/status") and got.message["state"] == "offline")
    assert (last.message["type"], last.message["node"]) == ("status", NODE)


def test_what_the_broker_does_not_take_whole_comes_in_parts(
    speaker: Engine, brokers: Callable[..., Broker], peers: Peers
) -> None:
    broker = brokers("max_packet_size 2000")
    with Board(speaker, Mqtt(url=broker.url), chat=Chat(max_tokens=4000)):
        peer = peers(broker, f"skerry/{NODE}/status", "mine")
        peer.online()
        peer.ask({"id": "q1", "text": "Say it."}, "mine", correlation=b"c")
        pieces, parts = [], []
        for got in peer.messages():
            if got.topic == "mine":
                assert len(got.payload) < 2000
                assert got.correlation == b"c"
                (pieces if got.message["type"] == "token" else parts).append(got.message)
                if parts and parts[-1]["part"] + 1 == parts[-1]["of"]:
                    break
        assert [part["part"] for part in parts] == list(range(parts[0]["of"]))
        assert {(part["type"], part["id"]) for part in parts} == {("part", "q1")}
        done = Got("", "".join(part["text"] for part in parts).encode(), False, None, {}).message
        assert done["type"] == "done"
        assert done["result"]["text"] == "".join(piece["text"] for piece in pieces) == SAID * 30


def test_two_boards_with_one_client_id(
    engine: Engine, broker: Broker, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """The other's last will, which the broker publishes when the board throws it out in turn, gives it away."""
    will = json.dumps({"type": "status", "state": "offline", "instance": "other"})
    with Board(engine, Mqtt(url=broker.url)):
        peer = peers(broker, OWN)
        peer.online()
        rival = peers(broker, client_id=f"skerry-{NODE}", will=(f"skerry/{NODE}/status", will))
        told = False
        for _ in range(20):
            assert rival.ended.wait(TIMEOUT_S)
            for got in peer.messages():
                told = told or (got.topic.endswith("/event") and got.message["event"] == "duplicate")
                if told or (got.topic.endswith("/status") and got.message["state"] == "idle"):
                    break
            if told:
                break
            rival.connect()
        assert told
        assert rival.ended.wait(TIMEOUT_S)
        peer = peers(broker, OWN)  # which sees what the board has published since
        peer.online()
        peer.ask({"id": "q1", "text": "Which one are you?", "max_tokens": 4})
        assert text_of(peer.answer("q1"))
    assert [record for record in caplog.records if f"two boards are called {NODE}" in record.message]


def test_tls_with_client_certificates_and_a_password(
    engine: Engine, brokers: Callable[..., Broker], peers: Peers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a clock that is not set: the broker's certificate is not valid yet, later it is."""
    authority = Authority(tmp_path / "ca")
    own, own_key = authority.issue("board")
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(passwords), NODE, f"{NODE}-secret"], check=True)
    secret.write_text(f"{NODE}-secret\n")
    secret.chmod(0o600)

    def lines(certificate: Path, key: Path) -> tuple[str, ...]:
        return (
            f"cafile {authority.certificate}",
            f"certfile {certificate}",
            f"keyfile {key}",
            "require_certificate true",
            "allow_anonymous false",
            f"password_file {passwords}",
        )

    broker = brokers(*lines(*authority.issue("early", begin="20400101000000Z")))
    settings = Mqtt(
        url=broker.url.replace("mqtt:", "mqtts:"),
        username=NODE,
        password_file=str(secret),
        ca_file=str(authority.certificate),
        cert_file=str(own),
        key_file=str(own_key),
    )
    with Board(engine, settings):
        until(lambda: "this board's clock says" in caplog.text, "the clock is named")
        broker.kill()
        broker.configure(*lines(*authority.issue("valid")))
        broker.start()
        peer = peers(
            broker, OWN, user=NODE, ca_certs=str(authority.certificate), certfile=str(own), keyfile=str(own_key)
        )
        peer.online()
        peer.ask({"id": "q1", "text": "Who is there?", "max_tokens": 4})
        assert text_of(peer.answer("q1"))


def test_refused_by_the_broker(
    engine: Engine, brokers: Callable[..., Broker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passwords = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(passwords), "other", "secret"], check=True)
    broker = brokers("allow_anonymous false", f"password_file {passwords}")
    with Board(engine, Mqtt(url=broker.url, username=NODE)):
        until(lambda: "the broker refuses the connection: Not authorized" in caplog.text, "the refusal is told")


def test_the_access_list_of_the_documents(
    engine: Engine, brokers: Callable[..., Broker], peers: Peers, tmp_path: Path
) -> None:
    """It lets the board do its work, and another board not read its questions."""
    example = re.search(r"```\n(# acl_file.*?)```", (ROOT / "docs" / "mqtt.md").read_text(), re.DOTALL)
    assert example
    (tmp_path / "acl").write_text(example[1])
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    passwords.touch()
    for user in (NODE, "app", "reef"):
        subprocess.run(["mosquitto_passwd", "-b", str(passwords), user, f"{user}-secret"], check=True)
    secret.write_text(f"{NODE}-secret")
    secret.chmod(0o600)
    broker = brokers("allow_anonymous false", f"password_file {passwords}", f"acl_file {tmp_path / 'acl'}")
    settings = Mqtt(
        url=broker.url, username=NODE, password_file=str(secret), fleet=True, discovery_prefix="homeassistant"
    )
    with Board(engine, settings):
        app = peers(broker, OWN, "skerry/app/reply/#", "homeassistant/#", user="app")
        reef = peers(broker, "skerry/+/ask", "skerry/+/reply/#", OWN, "skerry/reef/event", user="reef")
        app.online()
        app.ask({"id": "q1", "text": "Who is there?", "max_tokens": 4}, "skerry/app/reply/1")
        assert text_of(app.answer("q1"))
        app.publish(FLEET, {"type": "ask", "id": "q2", "text": "And now?", "max_tokens": 4}, "skerry/app/reply/2")
        assert text_of(app.answer("q2"))
        reef.publish("skerry/reef/event", "last")
        seen = {"skerry/fleet/ask"}  # which every board reads, when it comes
        while "skerry/reef/event" not in seen:
            seen.add(next(reef.messages()).topic)
        assert seen == {"skerry/fleet/ask", "skerry/reef/event"}


def test_refused_messages_are_told(
    engine: Engine, brokers: Callable[..., Broker], peers: Peers, tmp_path: Path
) -> None:
    """mosquitto's list of a topic's readers and writers lets everybody subscribe, so it is a reply that is refused."""
    writable = "".join(f"topic write skerry/{NODE}/{name}\n" for name in ("ask", "status", "event"))
    (tmp_path / "acl").write_text(f"topic read {OWN}\n{writable}")
    broker = brokers(f"acl_file {tmp_path / 'acl'}")
    peer = peers(broker, OWN)
    with Board(engine, Mqtt(url=broker.url)):
        peer.online()
        peer.ask({"id": "q1", "text": "Who is there?", "max_tokens": 4})
        message = peer.event("refused")["message"]
        assert message == f"the broker refuses a message on skerry/{NODE}/reply/q1: Not authorized"


def test_home_assistant_finds_the_sensors(engine: Engine, broker: Broker, peers: Peers, tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "temp").write_text("48250\n")
    settings = Mqtt(url=broker.url, discovery_prefix="homeassistant", telemetry_period_s=1)
    with Board(engine, settings, node="rock 5.b", host=Host(tmp_path)):
        watcher = peers(broker, "skerry/+/status", "skerry/+/telemetry")
        telemetry = watcher.wait(lambda got: got.topic == "skerry/rock 5.b/telemetry").message
        peer = peers(broker, "homeassistant/#")
        found: dict[str, dict[str, Any]] = {}
        while len(found) < 4:
            got = next(peer.messages())
            assert got.retain
            found[got.topic] = got.message
    assert sorted(found) == [
        f"homeassistant/sensor/skerry_rock_5_b/{key}/config" for key in ("memory", "speed", "state", "temperature")
    ]
    assert len({sensor["unique_id"] for sensor in found.values()}) == 4
    for sensor in found.values():
        assert sensor["state_topic"] in ("skerry/rock 5.b/status", "skerry/rock 5.b/telemetry")
        assert sensor["availability_topic"] == "skerry/rock 5.b/status"
    assert telemetry["type"] == "telemetry"
    assert telemetry["temperature_c"] == 48.25
    assert telemetry["dropped"] == 0


def test_a_fleet_shares_its_questions(engine: Engine, tiny_model: Path, broker: Broker, peers: Peers) -> None:
    settings = Mqtt(url=broker.url, fleet=True)
    with Board(engine, settings), Board(tiny_engine(tiny_model), settings, node="reef"):
        peer = peers(broker, "skerry/+/status", "skerry/+/reply/#", "mine")
        online: set[str] = set()
        while len(online) < 2:
            online.add(next(peer.messages()).message["node"])
        for number in range(6):
            peer.publish(FLEET, {"type": "ask", "id": f"q{number}", "text": "Who?", "max_tokens": 4}, "mine")
        ends: list[tuple[str, str]] = []
        while len(ends) < 6:
            got = peer.wait(lambda got: got.topic == "mine")
            if got.message["type"] != "token":
                assert got.message["type"] == "done", got.message
                ends.append((got.message["id"], got.user["node"]))
        assert sorted(request_id for request_id, _ in ends) == [f"q{number}" for number in range(6)]
        assert {node for _, node in ends} == {NODE, "reef"}
        peer.publish(FLEET, "Who is there?")  # without a response topic, the reply topic names the board
        got = peer.wait(lambda got: "/reply/" in got.topic)
        assert got.topic.split("/")[1] == got.user["node"]


def test_a_busy_board_says_so(engine: Engine, broker: Broker, peers: Peers) -> None:
    held = Stepwise(engine, steps=0)
    with Board(held, Mqtt(url=broker.url, fleet=True), service=Service(queue=1)):
        peer = peers(broker, f"skerry/{NODE}/status", "mine")
        peer.online()
        for number in range(SLOTS + 2):
            peer.publish(FLEET, {"type": "ask", "id": f"q{number}", "text": "Who?", "max_tokens": 2}, "mine")
        got = peer.wait(lambda got: got.topic == "mine")
        assert (got.message["id"], got.message["code"]) == (f"q{SLOTS + 1}", "busy")
        assert got.message["retry_after_s"] > 0
        held.go()
