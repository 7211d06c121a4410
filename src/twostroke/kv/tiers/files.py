"""The files of the disk tier: whether a folder may be used, the key in it, which file a block lies in, and writing that
notices a full disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.errors import BackendError
from twostroke.kv.prefix_index import KEY_BYTES
from twostroke.kv.tiers.segment import Record

KEY_NAME = "key"
SUFFIX = ".kvsegment"
ABANDONED_AFTER_S = 3600.0
_BEGUN = re.compile(r"\.(begun|key)-[a-z0-9_]{8}")
"""What a process writes before it gives it its name."""
_OF_A_FILE_SYSTEM = ("lost+found",)
"""An empty disk has it, too."""
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Segment:
    path: Path
    tag: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    """A block on disk. Good until its file is removed, which a read then finds out."""

    segment: Segment
    record: Record


class OpenFiles:
    """Files that several blocks are read from."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def of(self, found: Found) -> int:
        """Raises OSError."""
        path = found.segment.path
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    def expect(self, found: Found) -> None:
        """It will be read soon: the system may begin."""
        with contextlib.suppress(OSError, AttributeError):
            length = found.record.end - found.record.offset
            os.posix_fadvise(self.of(found), found.record.offset, length, os.POSIX_FADV_WILLNEED)

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def open_folder(folder: Path) -> bytes:
    """Make the folder unless it is there, and return its key. A folder that holds a user's own files is refused, and
    nothing in it changes. Raises BackendError."""
    try:
        try:
            folder.mkdir(mode=0o700, parents=True)
            folder.chmod(0o700)  # whatever the process's mask says
        except FileExistsError:
            _refuse_foreign(folder)
        return _read_or_make_key(folder / KEY_NAME)
    except OSError as error:
        raise BackendError(
            f"the folder for KV on disk, {folder}, cannot be used ({error.strerror or error}): choose another "
            "(--kv-disk)"
        ) from error


def _refuse_foreign(folder: Path) -> None:
    """A key of the right length, or a segment, says that an engine made the rest. So does an empty folder."""
    names = {entry.name for entry in folder.iterdir()}
    key = folder / KEY_NAME
    if any(name.endswith(SUFFIX) for name in names) or (key.is_file() and size(key) == KEY_BYTES):
        return
    others = sorted(name for name in names if name not in _OF_A_FILE_SYSTEM and not _BEGUN.fullmatch(name))
    if others:
        raise BackendError(
            f"the folder for KV on disk, {folder}, holds other files ({others[0]!r} for one): choose a folder that is "
            f"empty or not there yet, as {folder / 'kv'} (--kv-disk)"
        )
    if folder.stat().st_mode & stat.S_IWOTH:
        _LOG.warning("every user of this machine may write to %s, and so spoil the KV that is kept there", folder)


def _read_or_make_key(path: Path) -> bytes:
    """One key a folder, whoever makes it first: with it blocks are named, and files tagged."""
    with contextlib.suppress(FileNotFoundError):
        if len(key := path.read_bytes()) == KEY_BYTES:
            return key
        path.unlink()  # cut short, beside segments: what it named is lost
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".key-")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # fails where another process was quicker
    finally:
        Path(temporary).unlink()
    return path.read_bytes()


def write_all(descriptor: int, parts: list[memoryview], offset: int) -> None:
    """Raises OSError where the disk is full, or took nothing."""
    while parts:
        written = os.pwritev(descriptor, parts, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][written:]


def modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def segment_files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if path.name.endswith(SUFFIX)]
    return []


def segment_sizes(folder: Path) -> dict[Path, int]:
    return {path: size(path) for path in segment_files(folder)}


def abandoned_files(folder: Path) -> list[Path]:
    """That a process had begun when it was killed."""
    with contextlib.suppress(OSError):
        begun = [path for path in folder.iterdir() if _BEGUN.fullmatch(path.name)]
        return [path for path in begun if time.time() - modified(path) / 1e9 > ABANDONED_AFTER_S]
    return []
