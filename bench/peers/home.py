"""Where the bench keeps what it installs, converts and logs: folders that git ignores, or any place the user names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BENCH_FOLDER = Path(__file__).resolve().parents[1]
REPOSITORY = BENCH_FOLDER.parent
ADAPTERS = Path(__file__).resolve().parent / "adapters"
CONVERTERS = Path(__file__).resolve().parent / "convert"
RESULTS = BENCH_FOLDER / "results"


@dataclass(frozen=True, slots=True)
class Home:
    folder: Path

    @classmethod
    def find(cls, folder: str | None = None) -> Home:
        """The folder given, else `$BENCH_HOME`, else the bench's own."""
        return cls(Path(folder or os.environ.get("BENCH_HOME") or BENCH_FOLDER).expanduser().absolute())

    def venv(self, peer: str) -> Path:
        return self.folder / ".venvs" / peer

    def python(self, peer: str) -> Path:
        return self.venv(peer) / "bin" / "python"

    def models(self, source: Path) -> Path:
        """Where the conversions of one model file are."""
        return self.folder / ".models" / source.stem

    def log(self, name: str) -> Path:
        folder = self.folder / ".logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"
