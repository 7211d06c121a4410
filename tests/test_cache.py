from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twostroke.cache import cache_folder, read_entry, write_entry


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TWOSTROKE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_home_by_default(tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / ".cache" / "twostroke"


def test_the_shared_cache_folder_if_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/twostroke")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "twostroke"


def test_our_own_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("TWOSTROKE_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_an_entry_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "entry"
    assert read_entry(path) is None
    write_entry(path, b"code")
    assert read_entry(path) == b"code" and [path] == list(path.parent.iterdir())
    whole = path.read_bytes()
    for damaged in (b"", b"code", whole[:10], whole[:-1], whole + b"!"):
        path.write_bytes(damaged)
        assert read_entry(path) is None


def test_writers_of_one_entry_leave_one_of_theirs(tmp_path: Path) -> None:
    path, codes = tmp_path / "entry", [bytes([i]) * 100_000 for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda code: write_entry(path, code), codes * 4))
    assert read_entry(path) in codes and [path] == list(tmp_path.iterdir())
