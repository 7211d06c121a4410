"""What a person sees at a terminal: whole words at the margin, lines that can be edited, a history."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cache import cache_folder
from twostroke.cli.word_wrap import WordWrap

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

from tests.cli.terminal import Terminal, shown

COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
UP, LEFT = b"\x1b[A", b"\x1b[D"


def wrapped(pieces: list[str], width: int) -> list[str]:
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: width)
    for piece in pieces:
        wrap.feed(piece)
    return [line.rstrip() for line in shown("".join(written))]


@given(
    words=st.lists(st.text("abcdefgh.,-", min_size=1, max_size=20), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    width=st.integers(22, 50),
)
def test_words_are_wrapped_as_textwrap_does_it_however_they_come(words: list[str], cuts: list[int], width: int) -> None:
    text, pieces, at = " ".join(words), [], 0
    while at < len(text):
        length = cuts[len(pieces) % len(cuts)]
        pieces.append(text[at : at + length])
        at += length
    assert wrapped(pieces, width) == textwrap.wrap(text, width - 1, break_on_hyphens=False)


def test_what_is_longer_than_a_line_is_broken_and_lines_of_the_text_are_kept() -> None:
    assert wrapped(["see ", "x" * 30, "y" * 30], 41) == ["see", "x" * 30 + "y" * 10, "y" * 20]
    assert wrapped(["one\n\n  two", "\nthree"], 30) == ["one", "", "  two", "three"]
    assert wrapped(["漢字" * 15], 31) == ["漢字" * 7 + "漢", "字" + "漢字" * 7]
    unwrapped = "many words on a terminal that says nothing of its width"
    assert wrapped([unwrapped], 0) == [unwrapped]


def test_an_answer_is_wrapped_between_words_at_a_terminal_and_not_in_a_pipe(smollm2_path: Path) -> None:
    command = [*COMMAND, "run", "smollm2", "Write one sentence about the sea.", "--max-tokens", "40", "--no-phases"]
    piped = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert len(piped.splitlines()) == 1 and len(piped) > 80
    with Terminal(command, ENVIRONMENT, columns=44) as terminal:
        assert terminal.finish() == 0
    lines = [line.rstrip() for line in shown(terminal.seen.decode().replace("\r\n", "\n"))]
    answer = textwrap.wrap(piped, 43, break_on_hyphens=False)
    assert answer == [line for line in lines if line in answer]


@pytest.fixture
def own_cache(smollm2_path: Path, tmp_path: Path) -> Path:
    """A cache folder with what the user's holds, and a history of its own."""
    for name in ("models", "kernels", "packed", "ceilings"):
        (cache_folder() / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(cache_folder() / name)
    return tmp_path


def test_lines_can_be_edited_found_again_and_pasted(own_cache: Path) -> None:
    history = own_cache / "chat_history"
    history.write_text("What is two plus two?\n")
    command = [*COMMAND, "chat", "smollm2", "--max-tokens", "2", "--temperature", "0"]
    with Terminal(command, {**ENVIRONMENT, "TWOSTROKE_CACHE": str(own_cache)}) as terminal:
        typed = (
            UP + b"\r",  # from the conversation before
            b"Say helo" + LEFT + b"l\r",
            UP + UP + b"\r",
            b"\x1b[200~First line\nsecond line\x1b[201~\r",
            b"A line that goes\\\ron\r",
        )
        for keys in typed:
            terminal.wait_for(b"> ")
            terminal.type(keys)
            terminal.wait_for(b"cached)")
        terminal.wait_for(b"> ")
        terminal.type(b"\x04")
        assert terminal.finish() == 0
    assert history.read_text().splitlines() == [
        "What is two plus two?",
        "What is two plus two?",
        "Say hello",
        "What is two plus two?",
        "First line second line",
        "A line that goes on",
    ]
    assert history.stat().st_mode & 0o777 == 0o600


ECHO = """
import sys
from pathlib import Path
from twostroke.cli.line_editor import line_editor
with line_editor(Path(sys.argv[1]) if len(sys.argv) > 1 else None) as editor:
    while (line := editor.read("> ")) is not None:
        print("got", repr(line))
"""


def test_a_history_can_be_refused_and_one_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments in ([], [str(tmp_path / "file" / "history")]):
        with Terminal([sys.executable, "-c", ECHO, *arguments], ENVIRONMENT) as terminal:
            terminal.wait_for(b"> ")
            terminal.type(b"A secret\r")
            terminal.wait_for(b"got 'A secret'")
            terminal.wait_for(b"> ")
            terminal.type(UP + b"!\r")
            terminal.wait_for(b"got 'A secret!'")
            terminal.wait_for(b"> ")
            terminal.type(b"\x04")
            assert terminal.finish() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lines_that_are_piped_are_what_they_are(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ECHO, str(tmp_path / "history")],
        input="one\\\ntwo\n",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "> got 'one\\\\'\n> got 'two'\n> \n"
    assert not (tmp_path / "history").exists()
