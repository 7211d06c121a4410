from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.cache import cache_folder


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
