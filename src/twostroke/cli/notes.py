"""What a command says beside its answer, and the files it leaves."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from twostroke.core.errors import BadRequestError


def say(console: Console, text: str, style: str = "dim") -> None:
    """As it is, whatever looks like markup, on as many lines as it has."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def check_place(path: Path) -> None:
    """Before minutes are spent on what could not be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadRequestError(f"{path} cannot be written: give a file in a folder that exists")


def write(notes: Console, path: Path, text: str, what: str = "written") -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequestError(f"{path} could not be written: {error.strerror}") from None
    say(notes, f"{what}: {path}")


def plain_name(name: str) -> str:
    """That any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
