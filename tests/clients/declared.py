"""What each client is: its pinned packages and the script that uses it, and the lines of that script that the page
shows. Nothing here is installed or run."""

from __future__ import annotations

import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
USES = HERE / "uses"
LANGUAGES = {".py": "python", ".mjs": "javascript"}

SHOWN = re.compile(r"^[ \t]*(?:#|//) shown(?:: (?P<language>\w+))?\n(?P<lines>.*?)^[ \t]*(?:#|//) end$", re.M | re.S)
"""The lines between `# shown` and `# end`; `# shown: sh` where they are a command inside a Python string."""

VALUES = {
    "BASE_URL": "http://127.0.0.1:8000/v1",
    "ADDRESS": "http://127.0.0.1:8000",
    "API_KEY": "your-key",
    "MODEL": "smollm2",
    "TOKENIZER": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
"""What a reader would write where the script takes what it is given."""


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    about: str
    """What it is, to somebody who has not heard of it."""
    packages: tuple[str, ...] = ()
    """For pip; the first one's version is the client's."""
    npm: tuple[str, ...] = ()
    large: str | None = None
    """Why it is installed only when it is asked for by name."""
    remove: tuple[str, ...] = ()
    """Packages that come along and break the import of what is needed."""

    @property
    def version(self) -> str:
        if self.npm:
            return self.npm[0].rpartition("@")[2]
        return self.packages[0].partition("==")[2] if self.packages else "HTTP/1.1"

    @property
    def use(self) -> Path:
        suffix = ".mjs" if self.npm else ".py"
        return USES / f"use_{self.name.replace('-', '_')}{suffix}"

    @property
    def constraints(self) -> Path:
        """Every package of its environment with the version that it was tried with."""
        return HERE / "locked" / f"{self.name}.txt"

    @property
    def npm_folder(self) -> Path:
        return HERE / "npm" / self.name


def declared() -> dict[str, Client]:
    with (HERE / "clients.toml").open("rb") as file:
        table = tomllib.load(file)
    clients = {}
    for name, fields in table.items():
        lists = {key: tuple(fields.pop(key)) for key in ("packages", "npm", "remove") if key in fields}
        clients[name] = Client(name, **fields, **lists)
    return clients


def chosen(names: str) -> list[Client]:
    """Those named between commas; without a name all that are not large."""
    clients = declared()
    if not names.strip():
        return [client for client in clients.values() if client.large is None]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in clients]:
        raise SystemExit(f"there is no client {', '.join(unknown)}; there are {', '.join(clients)}")
    return [clients[name] for name in wanted]


def snippet(client: Client) -> tuple[str, str]:
    """The language and the lines that the page shows, with values that a reader can run."""
    regions = list(SHOWN.finditer(client.use.read_text(encoding="utf-8")))
    language = next((region["language"] for region in regions if region["language"]), LANGUAGES[client.use.suffix])
    lines = "\n".join(textwrap.dedent(region["lines"]).strip("\n") for region in regions)
    return language, _with_values(lines, language)


def _with_values(lines: str, language: str) -> str:
    names = "|".join(VALUES)
    if language == "sh":
        return re.sub(rf"\$({names})\b", lambda match: VALUES[match[1]], lines)
    # A name alone in a formatted string becomes part of a plain one; a name elsewhere becomes a string.
    lines = re.sub(rf'f"([^"{{]*)\{{({names})\}}([^"{{]*)"', lambda m: f'"{m[1]}{VALUES[m[2]]}{m[3]}"', lines)
    return re.sub(rf"(?<![\w.])({names})\b(?!=)", lambda match: f'"{VALUES[match[1]]}"', lines)
