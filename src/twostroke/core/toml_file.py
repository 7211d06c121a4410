"""Reads files that an operator writes in TOML, with a bound on their size, and checks their tables. Every mistake is
told in one sentence that names the place. Knows no file's fields."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.core.setting import shown

MAX_FILE_BYTES = 1 << 20


def read_toml_text(path: str | Path, source: str) -> str:
    """Returns the text of a file. `source` is what errors call the file."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequestError(f"{source} could not be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise BadRequestError(f"{source}: this is longer than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequestError(f"{source}: this is not text") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadRequestError(f"{source}: this is not TOML: {error}") from None


def as_table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} must be a table, not {shown(value):.60}")
    return value


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise BadRequestError(f"{where} has no field {unknown[0]!r:.60}: it has {', '.join(known)}")
