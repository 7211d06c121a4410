"""Lines that a person types: edited with the arrow keys, with a history that is kept for the next conversation; several
lines that are pasted are one. Where input is no terminal, or Python has no readline, a line is what comes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

MOST_ENTRIES = 1000
CONTINUED = "\\"
"""At the end of a typed line: the next one belongs to it."""


class LineEditor:
    def __init__(self, readline: ModuleType | None, is_terminal: bool) -> None:
        self._readline, self._is_terminal = readline, is_terminal

    def read(self, prompt: str) -> str | None:
        """What was typed, stripped; None at its end (Ctrl-D)."""
        try:
            text = input(prompt)
            while self._is_terminal and text.endswith(CONTINUED):
                text = text.removesuffix(CONTINUED) + "\n" + input("." * (len(prompt) - 1) + " ")
        except EOFError:
            print()
            return None
        text = text.strip()
        if self._readline is not None and text:
            self._readline.add_history(" ".join(text.splitlines()))  # its file has a line for each entry
        return text


@contextlib.contextmanager
def line_editor(history: Path | None) -> Iterator[LineEditor]:
    """`history`: where what was typed is kept; None: nowhere."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    readline = _readline() if is_terminal else None
    if readline is None:
        yield LineEditor(None, is_terminal)
        return
    if history is not None:
        with contextlib.suppress(OSError, ValueError):
            readline.read_history_file(history)
    try:
        yield LineEditor(readline, is_terminal)
    finally:
        if history is not None:
            _keep(readline, history)


def _readline() -> ModuleType | None:
    """With it imported, `input` edits lines. Not every build of Python has it."""
    try:
        import readline
    except ImportError:
        return None
    if "libedit" not in (readline.__doc__ or ""):  # it reads other settings, and knows no pastes
        readline.parse_and_bind("set enable-bracketed-paste on")
    readline.clear_history()
    readline.set_auto_history(False)
    readline.set_history_length(MOST_ENTRIES)
    return readline


def _keep(readline: ModuleType, history: Path) -> None:
    """For the user's eyes alone. A history that cannot be written is done without."""
    with contextlib.suppress(OSError):
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(history)
        history.chmod(0o600)
