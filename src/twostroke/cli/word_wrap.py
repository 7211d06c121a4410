"""Text that comes in pieces, broken between words at a terminal's margin. A word is shown as it comes; one that reaches
the margin is taken back and begun again on the next line. Pipes and files get their text as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len

TAB_CELLS = 8
LEAST_CELLS = 20
"""On a narrower terminal lines are left to it."""


class WordWrap:
    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        """`width`: of the terminal, in cells, asked before each piece: it may change."""
        self._write, self._width = write, width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> None:
        # The last column stays free: a terminal that has just filled it does not say where its cursor is.
        limit = self._width() - 1
        if limit < LEAST_CELLS:
            self._write(text)
            return
        out = _Output()
        for character in text:
            cells = cell_len(character)
            if character in "\r\n":
                out.add(character)
                self._column, self._word = 0, ""
            elif character.isspace():
                cells = TAB_CELLS - self._column % TAB_CELLS if character == "\t" else max(1, cells)
                self._space(character, cells, limit, out)
            else:
                self._letter(character, cells, limit, out)
        self._write(out.text)

    def _space(self, character: str, cells: int, limit: int, out: _Output) -> None:
        self._word = ""
        if self._column + cells > limit:  # the line is full: its end is space enough
            out.add("\n")
            self._column = 0
        else:
            out.add(character)
            self._column += cells

    def _letter(self, character: str, cells: int, limit: int, out: _Output) -> None:
        if self._column + cells > limit:
            if cell_len(self._word) == self._column:  # a word as long as the line: it is broken here
                self._word = ""
            else:
                out.take_back(self._word)
            out.add("\n" + self._word)
            self._column = cell_len(self._word)
        out.add(character)
        self._column += cells
        # Scripts of wide characters are written without spaces, and may be broken behind any of them.
        self._word = "" if cells > 1 else self._word + character


class _Output:
    """What a piece adds to the screen."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        self.text += text

    def take_back(self, word: str) -> None:
        """Unwrite the word that the line ends with. What of it came with earlier pieces is on the screen, and is wiped
        out there; then all that this piece has added is the rest of it."""
        if self.text.endswith(word):
            self.text = self.text.removesuffix(word)
        else:
            self.text = f"\x1b[{cell_len(word) - cell_len(self.text)}D\x1b[K"


def writer_to(stream: TextIO) -> Callable[[str], object]:
    """What writes pieces of an answer to a stream: wrapped where it is a terminal that can take a word back."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return stream.write
    return WordWrap(stream.write, lambda: _columns(stream)).feed


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
