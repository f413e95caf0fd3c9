"""The command line. Exit codes: 0 done, 1 failed, 2 misuse, 78 bad configuration (EX_CONFIG of sysexits.h)."""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from pathlib import Path

import msgspec

from skerry import __version__
from skerry.chat import LocalTalker, RemoteTalker, Talker, converse, request
from skerry.config import Config, Paths, changes, dump, load_with_origins
from skerry.core import Done, Message, Reason, Role
from skerry.daemon import build_engine, check, serve
from skerry.errors import ConfigError, RequestError, SkerryError
from skerry.host import Host
from skerry.remote import MqttLink, SerialLink
from skerry.systemd import log_handler
from skerry.terminal import Terminal

OK, FAILED, MISUSE, BAD_CONFIG = 0, 1, 2, 78
_LONGEST_QUESTION = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # no locale may end an answer with an error
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        code: int = options.run(options)
        return code
    except ConfigError as error:
        for problem in error.problems:
            print(f"skerry: {problem}", file=sys.stderr)
        if error.hint:
            print(f"skerry: {error.hint}", file=sys.stderr)
        return BAD_CONFIG
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `skerry ask ... | head`: nobody reads any more, and nothing is left to flush
        sys.stdout = None
        return FAILED
    except OSError as error:  # a full disk behind standard output, a terminal that is gone
        with suppress(OSError, AttributeError):
            print(f"skerry: {error.strerror or error}", file=sys.stderr)
        sys.stdout = None
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skerry", description="A language model on this board, offline.")
    parser.add_argument("--version", action="version", version=f"skerry {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read this file instead of /etc/skerry")
    parser.add_argument("--verbose", action="store_true", help="say what happens")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    chat = commands.add_parser("chat", help="talk to the model in this terminal")
    chat.set_defaults(run=_chat)
    far = chat.add_mutually_exclusive_group()
    far.add_argument("--serial", metavar="PORT", help="talk to the board at this serial port")
    far.add_argument("--mqtt", metavar="URL", help="talk to the board at mqtt://[user[:password]@]broker/NODE")
    chat.add_argument("--baud", type=_positive, default=115_200, help="speed of the serial port (default: 115200)")
    ask = commands.add_parser("ask", help="answer one question")
    ask.add_argument("text", help="the question; - reads it from standard input")
    ask.add_argument("--json", action="store_true", help="print the result as JSON")
    ask.add_argument("--max-tokens", type=_positive, metavar="N", help="end the answer after N tokens")
    ask.set_defaults(run=_ask)
    for command in (chat, ask):
        command.add_argument("--model", metavar="NAME", help="a model's name or folder, instead of model.path")

    run = commands.add_parser("run", help="serve the serial ports and the broker of the configuration")
    run.set_defaults(run=_run)
    check = commands.add_parser("check-config", help="read the configuration and report every problem")
    check.set_defaults(run=_check_config)
    dumped = commands.add_parser("dump-config", help="print the configuration in force")
    dumped.add_argument("--changes", action="store_true", help="only what differs from the defaults, and where from")
    dumped.add_argument("--json", action="store_true", help="as JSON")
    dumped.set_defaults(run=_dump_config)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _paths(options: argparse.Namespace) -> Paths:
    if options.config:
        return Paths(file=options.config, drop_ins=None, must_exist=True)
    return Paths()


def _config(options: argparse.Namespace) -> Config:
    config = load_with_origins(_paths(options))[0]
    if getattr(options, "model", None):
        model = msgspec.structs.replace(config.model, path=options.model)
        config = msgspec.structs.replace(config, model=model)
    return config


def _run(options: argparse.Namespace) -> int:
    root = logging.getLogger()
    root.handlers = [log_handler()]
    root.setLevel(logging.DEBUG if options.verbose else logging.INFO)
    serve(_paths(options))
    return OK


def _check_config(options: argparse.Namespace) -> int:
    check(load_with_origins(_paths(options))[0])
    print("the configuration is good")
    return OK


def _dump_config(options: argparse.Namespace) -> int:
    config, origins = load_with_origins(_paths(options))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(config)).decode())
    else:
        print(changes(config, origins) if options.changes else dump(config), end="")
    return OK


def _ask(options: argparse.Namespace) -> int:
    config = _config(options)
    text = _standard_input() if options.text == "-" else options.text
    engine = build_engine(config, Host())
    asked = request(config, [Message(Role.USER, text)])
    if options.max_tokens:
        asked = msgspec.structs.replace(asked, max_tokens=options.max_tokens)
    engine.add(asked)
    done = None
    while done is None:
        for event in engine.step():
            if isinstance(event, Done):
                done = event
            elif not options.json:
                print(event.text, end="", flush=True)
    if options.json:
        print(msgspec.json.encode(done.result).decode())
    else:
        print()
    if done.error:
        print(f"skerry: {done.error}", file=sys.stderr)
    elif done.result.reason == Reason.CAPACITY and not options.json:
        print(f"skerry: the conversation is full at {engine.capacity} tokens (arena.max_tokens)", file=sys.stderr)
    return FAILED if done.error else OK


def _standard_input() -> str:
    """The question on standard input. Raises RequestError when there is none, or more than any model takes."""
    if sys.stdin is None:
        raise RequestError("standard input is closed")
    text = sys.stdin.read(_LONGEST_QUESTION + 1)
    if len(text) > _LONGEST_QUESTION:
        raise RequestError(f"the question is longer than {_LONGEST_QUESTION} characters", "shorten it")
    return text


def _chat(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        talker: Talker
        if options.serial:
            talker = RemoteTalker(stack.enter_context(SerialLink(options.serial, options.baud)))
        elif options.mqtt:
            talker = RemoteTalker(stack.enter_context(MqttLink(options.mqtt)))
        else:
            config = _config(options)
            print("loading the model ...", file=sys.stderr)
            talker = LocalTalker(build_engine(config, Host()), config)
        converse(talker, stack.enter_context(Terminal()))
    return OK


if __name__ == "__main__":
    sys.exit(main())
