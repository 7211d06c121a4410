"""Weights that were brought to another form, kept on disk so that it is done once: `cache_folder()/packed/SOURCE-FORM`,
their bytes and behind them what proves them whole. An entry that is damaged is refused; a folder that cannot be written
only costs the next start its time. Knows bytes: what they are is the backend's."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from twostroke.models.checkpoint import Checkpoint, FileTensors

Bytes = npt.NDArray[np.uint8]

_TRAILER = struct.Struct("<16sQ32s")  # magic, bytes of weights, sha256 of name, size and CRCs
_MAGIC = b"TWOSTROKE-PACK-2"
_CHUNK_BYTES = 1 << 20
"""What one CRC of the trailer covers."""
_SAMPLE_BYTES = 64
_FORMS_KEPT = 3
"""Entries of one source that are kept: a choice or two of `quantise`, and another version of this program."""
_FOLDER_LIMIT_BYTES = 20 * 10**9
_SHARE_OF_FREE_DISK = 0.5
_ABANDONED_AFTER_S = 3600.0
"""A file that was being written this long ago was left by a process that was killed."""


class DamagedEntryError(Exception):
    """An entry is there, and it is not what was written."""


def source_of(checkpoint: Checkpoint) -> str | None:
    """What tells the files of these weights from others; None: no file says what they are."""
    if not isinstance(checkpoint.tensors, FileTensors):
        return None
    found = hashlib.sha256(checkpoint.tensors.part.encode())
    try:
        for file in checkpoint.tensors.files:
            status = file.stat()
            found.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError:
        return None
    return found.hexdigest()[:24]


def glances(checkpoint: Checkpoint) -> Iterator[bytes]:
    """Of each tensor. A file that was changed under its old size and time is told by what is in it, as far as a glance
    goes."""
    for name, tensor in checkpoint.tensors.items():
        yield f"{name}\0{tensor.kind.name}\0{tensor.shape}\0".encode() + tensor.glance(_SAMPLE_BYTES)


def read(path: Path, num_bytes: int, threads: int = 1) -> Bytes | None:
    """An entry's weights, read-only in the page cache, which all processes share; None where there is none. Raises
    DamagedEntryError.

    They are mapped, not read into huge pages of our own: decode is as fast either way (see bench/results/startup.md),
    a start does not copy them, and a second engine costs no second copy. Every byte is checked all the same, by CRCs of
    chunks: a sha256 of all would take as long as packing anew. That brings the pages in, too."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes + _crc_bytes(num_bytes) + _TRAILER.size:
                raise DamagedEntryError
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        memory.madvise(mmap.MADV_WILLNEED)
    whole = np.frombuffer(memory, dtype=np.uint8)
    data, rest = whole[:num_bytes], whole[num_bytes:]
    stored = rest[: -_TRAILER.size].tobytes()
    if rest[-_TRAILER.size :].tobytes() != _trailer(path, num_bytes, stored) or _crcs(data, threads) != stored:
        raise DamagedEntryError
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: the folder is cleared of what was not used for longest
    return data


def discard(path: Path) -> None:
    """The next start packs anew."""
    with contextlib.suppress(OSError):
        path.unlink()


def write(path: Path, data: Bytes, threads: int = 1) -> str | None:
    """Keep packed weights; None, or why that is not possible."""
    return write_parts(path, [data], len(data), threads)


def write_parts(path: Path, parts: Iterable[Bytes], num_bytes: int, threads: int = 1) -> str | None:
    """As `write`, of parts that lie behind one another, and are asked for only where there is room for all."""
    temporary: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if num_bytes > _SHARE_OF_FREE_DISK * free:
            return f"they take {num_bytes / 1e6:,.1f} MB, and the disk of {path.parent} has {free / 1e6:,.1f} MB left"
        # A name of its own until all is on the disk: a killed process or a second one leaves the entry whole or absent.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "w+b") as file:
            for part in parts:
                file.write(part.data)
            crcs = _crcs_of_file(file, num_bytes, threads)
            file.write(crcs + _trailer(path, num_bytes, crcs))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        temporary = None
        _clear(path)
    except OSError as error:
        return f"{path.parent} cannot be written ({error.strerror or error})"
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
    return None


def _trailer(path: Path, num_bytes: int, crcs: bytes) -> bytes:
    proof = hashlib.sha256(path.name.encode() + struct.pack("<Q", num_bytes) + crcs).digest()
    return _TRAILER.pack(_MAGIC, num_bytes, proof)


def _crc_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _CHUNK_BYTES) * 4


def _crcs(data: Bytes, threads: int) -> bytes:
    """The CRC of each chunk. It depends on where a byte lies: bytes that changed places are found, too."""
    chunks = [data[first : first + _CHUNK_BYTES] for first in range(0, len(data), _CHUNK_BYTES)]
    with ThreadPoolExecutor(threads, thread_name_prefix="crc") as pool:
        found = list(pool.map(zlib.crc32, chunks))  # zlib lets go of Python's lock
    return struct.pack(f"<{len(found)}I", *found)


def _crcs_of_file(file: BinaryIO, num_bytes: int, threads: int) -> bytes:
    """Of what was written, in the page cache as yet."""
    file.flush()
    assert file.tell() == num_bytes
    if not num_bytes:
        return b""
    with mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ) as memory:
        return _crcs(np.frombuffer(memory, dtype=np.uint8), threads)


def _clear(newest: Path) -> None:
    """Remove what was abandoned, old forms of the source just written, and the longest unused beyond the folder's
    limit. A process that has a removed file mapped keeps it until it ends."""
    total, same_source, source = 0, 0, newest.name.partition("-")[0]
    for _, size, path in sorted(_entries(newest.parent), reverse=True):
        total += size
        same_source += path.name.startswith(source)
        outdated = total > _FOLDER_LIMIT_BYTES or (path.name.startswith(source) and same_source > _FORMS_KEPT)
        if outdated and path != newest:
            with contextlib.suppress(OSError):
                path.unlink()


def _entries(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(when last used, size, path) of each entry; abandoned files are removed on the way."""
    for path in folder.iterdir():
        try:
            status = path.stat()
            if not path.name.startswith("."):
                yield status.st_mtime_ns, status.st_size, path
            elif time.time() - status.st_mtime > _ABANDONED_AFTER_S:
                path.unlink()
        except OSError:
            continue  # another process was quicker
