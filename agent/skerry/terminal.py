"""The terminal of a person: streamed text, and a status line at the bottom that stays while text scrolls above it.

Control sequences are those of ECMA-48 and DEC's VT100 (DECSTBM sets the scrolling region). Without a terminal, or with
TERM=dumb, the status is left out and only the text remains.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType

from skerry.transport.lineedit import harmless

with suppress(ImportError):  # line editing and history for input(); a minimal image may leave it out
    import readline  # noqa: F401

_ESC = "\x1b"


class Terminal:
    """Use as a context manager, which gives the terminal back as it was."""

    def __init__(self) -> None:
        person = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self._live = person and os.environ.get("TERM", "dumb") != "dumb"
        self._lines = 0
        self._status = ""
        self._reading = False
        self._interrupted = False

    def __enter__(self) -> "Terminal":
        self.status("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._put(f"{_ESC}7{_ESC}[r{_ESC}[{self._lines};1H{_ESC}[2K{_ESC}8")

    def write(self, text: str) -> None:
        """Show text of the model: control characters in it must not drive the terminal."""
        self._put(harmless(text))

    def line(self, text: str) -> None:
        """A line of our own."""
        self._put(text + "\n")

    def catch_interrupts(self) -> None:
        """From now on Ctrl-C interrupts `read` only; elsewhere it is kept for `interrupted` to tell."""

        def note(_signal: int, _frame: FrameType | None) -> None:
            if self._reading:
                raise KeyboardInterrupt
            self._interrupted = True

        signal.signal(signal.SIGINT, note)

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed since this was last asked."""
        pressed, self._interrupted = self._interrupted, False
        return pressed

    def read(self, prompt: str) -> str:
        """A line that the person types. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        if sys.stdin is None:
            raise EOFError
        self.status(self._status)
        self._interrupted = False
        try:
            self._reading = True
            return input(prompt if sys.stdin.isatty() else "")
        finally:
            self._reading = False

    def status(self, text: str) -> None:
        """Replace the status line."""
        self._status = text
        if not self._live:
            return
        columns, lines = shutil.get_terminal_size()
        if lines != self._lines:  # new, or the window changed: room for the line, then keep it out of the scrolling
            self._lines = lines
            self._put(f"\n{_ESC}[A{_ESC}7{_ESC}[1;{lines - 1}r{_ESC}8")
        self._put(f"{_ESC}7{_ESC}[{lines};1H{_ESC}[2K{_ESC}[7m {text[: columns - 2]:<{columns - 2}} {_ESC}[0m{_ESC}8")

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
