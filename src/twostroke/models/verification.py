"""Whether a file on this disk is what it should be: by its sha256, by a stamp that is kept beside it once that was
right, or by the digest that the Hub's cache names its bytes with. Fetches nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

CHUNK_BYTES = 1 << 20

_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


def damage(path: Path, num_bytes: int, sha256: str, *, trusts_stamp: bool) -> str | None:
    """None: the file is whole; else a sentence that names it and says what is wrong. With `trusts_stamp`, a file that
    was found whole and not written to since is not read again: hashing it would take longer than loading it."""
    status = path.stat()
    if status.st_size != num_bytes:
        return f"{path} is damaged: it has {status.st_size:,} bytes, not {num_bytes:,}"
    if trusts_stamp and _read_stamp(path) == _stamp(status, sha256):
        return None
    found = file_sha256(path)
    if found != sha256:
        return f"{path} is damaged: its sha256 is {found}, not {sha256}"
    _write_stamp(path, status, sha256)
    return None


def mark_whole(path: Path, sha256: str) -> None:
    """Keep that a file was just written with this sha256."""
    _write_stamp(path, path.stat(), sha256)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hub_digest(path: Path) -> str | None:
    """What the Hub's cache says of a file's bytes: a snapshot's files are links to blobs, and a blob's name is the
    sha256 of a large file, the git hash of a small one. None: this file is no such link."""
    name = path.resolve().name
    is_blob = path.is_symlink() and (_SHA256.fullmatch(name) or _GIT_SHA1.fullmatch(name))
    return name if is_blob else None


def hub_damage(path: Path, digest: str) -> str | None:
    """None: the file has the digest that `hub_digest` gave; else a sentence that names it."""
    if _SHA256.fullmatch(digest):
        kind, found = "sha256", file_sha256(path)
    else:
        kind, found = "git hash", _git_hash(path)
    return None if found == digest else f"{path} is damaged: its {kind} is {found}, not {digest}"


def _git_hash(path: Path) -> str:
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _stamp(status: os.stat_result, sha256: str) -> str:
    """Every write to a file moves the last of these times, which nobody can set back as they can the first."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {sha256}\n"


def _stamp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def _read_stamp(path: Path) -> str | None:
    try:
        return _stamp_path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def _write_stamp(path: Path, status: os.stat_result, sha256: str) -> None:
    """Where it cannot be written, or was only half, the next start hashes the file again."""
    with contextlib.suppress(OSError):
        _stamp_path(path).write_text(_stamp(status, sha256), encoding="ascii")
