"""The command line. Exit codes: 0 done, 1 failed, 2 misuse, 78 bad configuration (EX_CONFIG of sysexits.h)."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from skerry import __version__
from skerry.config import Config, Paths, changes, dump, load_with_origins
from skerry.core import Done, Message, Reason, Request, Result, Role
from skerry.daemon import build_engine
from skerry.engine import Engine
from skerry.errors import ConfigError, SkerryError
from skerry.host import Host
from skerry.terminal import Terminal

OK, FAILED, MISUSE, BAD_CONFIG = 0, 1, 2, 78

CHAT_HELP = """\
/help     this
/reset    forget the conversation
/status   what is in memory
/quit     leave (as does Ctrl-D); Ctrl-C ends an answer"""
_STATUS_PERIOD_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skerry", description="A language model on this board, offline.")
    parser.add_argument("--version", action="version", version=f"skerry {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read this file instead of /etc/skerry")
    parser.add_argument("--verbose", action="store_true", help="say what happens")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    chat = commands.add_parser("chat", help="talk to the model in this terminal")
    chat.set_defaults(run=_chat)
    ask = commands.add_parser("ask", help="answer one question")
    ask.add_argument("text", help="the question; - reads it from standard input")
    ask.add_argument("--json", action="store_true", help="print the result as JSON")
    ask.add_argument("--max-tokens", type=_positive, metavar="N", help="end the answer after N tokens")
    ask.set_defaults(run=_ask)
    for command in (chat, ask):
        command.add_argument("--model", metavar="NAME", help="a model's name or folder, instead of model.path")

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


def _check_config(options: argparse.Namespace) -> int:
    load_with_origins(_paths(options))
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
    text = sys.stdin.read() if options.text == "-" else options.text
    engine = build_engine(config, Host())
    request = _request(config, [*_system(config), Message(Role.USER, text)])
    if options.max_tokens:
        request = msgspec.structs.replace(request, max_tokens=options.max_tokens)
    engine.add(request)
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


def _chat(options: argparse.Namespace) -> int:
    config = _config(options)
    with Terminal() as terminal:
        terminal.status("loading the model ...")
        engine = build_engine(config, Host())
        terminal.catch_interrupts()
        terminal.line("Type a question; /help for more.")
        terminal.status(_arena_status(engine))
        history: list[Message] = []
        while True:
            try:
                text = terminal.read("> ").strip()
            except EOFError:
                terminal.line("")
                return OK
            except KeyboardInterrupt:
                terminal.line("\n(Ctrl-D or /quit leaves)")
                continue
            match text:
                case "":
                    continue
                case "/quit":
                    return OK
                case "/help":
                    terminal.line(CHAT_HELP)
                case "/reset":
                    history.clear()
                    terminal.line("(a new conversation)")
                case "/status":
                    terminal.line(_arena_status(engine))
                case _ if text.startswith("/"):
                    terminal.line(f"{text.split()[0]}: no such command\n{CHAT_HELP}")
                case _:
                    history.append(Message(Role.USER, text))
                    try:
                        result = _answer(engine, _request(config, [*_system(config), *history]), terminal)
                    except SkerryError as error:
                        history.pop()
                        terminal.line(str(error))
                    else:
                        history.append(Message(Role.ASSISTANT, result.text))


def _answer(engine: Engine, request: Request, terminal: Terminal) -> Result:
    """Stream one answer with a live status; Ctrl-C ends it early. Raises SkerryError when it fails."""
    number = engine.add(request)
    begin = shown = time.monotonic()
    count = 0
    while True:
        for event in engine.step():
            if isinstance(event, Done):
                terminal.line("")
                terminal.status(_result_status(engine, event.result))
                if event.error:
                    raise SkerryError(event.error)
                return event.result
            count += 1
            terminal.write(event.text)
        if (now := time.monotonic()) - shown > _STATUS_PERIOD_S:
            shown = now
            terminal.status(f"{count} pieces, {now - begin:.1f} s | {_arena_status(engine)}")
        if terminal.interrupted():
            engine.cancel(number)


def _result_status(engine: Engine, result: Result) -> str:
    tokens, times = result.tokens, result.timings_ms
    seconds = (times.total - times.first) / 1000
    speed = f"{(tokens.generated - 1) / seconds:.1f} tokens/s" if seconds > 0 and tokens.generated > 1 else "-"
    parts = [
        f"{tokens.generated} tokens",
        speed,
        f"first after {times.first / 1000:.2f} s",
        f"prompt {tokens.prompt} ({tokens.reused} reused)",
        _arena_status(engine),
    ]
    notes = [] if result.reason == Reason.STOP else [f"ended by {result.reason}"]
    return " | ".join(parts + notes + ["older turns left out"] * result.truncated)


def _arena_status(engine: Engine) -> str:
    slots = ", ".join(f"{used}/{engine.capacity}" for used in engine.used())
    return f"arena {slots} tokens"


def _system(config: Config) -> list[Message]:
    return [Message(Role.SYSTEM, config.chat.system_prompt)] if config.chat.system_prompt else []


def _request(config: Config, messages: list[Message]) -> Request:
    return Request(tuple(messages), config.chat.max_tokens, config.sampling, config.chat.stop)


if __name__ == "__main__":
    sys.exit(main())
