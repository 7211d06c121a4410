"""The files of the page, read once, each with its type and a validator. They lie in `static/` as a browser takes them:
nothing is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    name: str
    """From `static/` on, with slashes."""
    content: bytes
    kind: str
    """Its Content-Type."""
    tag: str
    """Its ETag: of its content alone."""


@cache
def page_files() -> dict[str, PageFile]:
    """By name. A file of a kind that is not known here is none of the page's."""
    return read_files(STATIC)


def read_files(folder: Path) -> dict[str, PageFile]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TYPES and path.is_file():
            name, content = path.relative_to(folder).as_posix(), path.read_bytes()
            found[name] = PageFile(name, content, _TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')
    return found
