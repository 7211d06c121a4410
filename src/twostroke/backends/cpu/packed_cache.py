"""Packed weights kept on disk, so that a model is repacked and quantised once: `cache_folder()/packed/SOURCE-FORM`, the
bytes of the arena and behind them what proves them whole. An entry that is damaged, or is of other files, is packed
again; a folder that cannot be written only costs the next start its time."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from twostroke.backends.cpu import arguments
from twostroke.backends.cpu.memory import Bytes
from twostroke.cache import cache_folder
from twostroke.core.formats import STORED
from twostroke.models import checkpoint as checkpoint_module
from twostroke.models.checkpoint import Checkpoint, FileTensors

_TRAILER = struct.Struct("<16sQ32s")  # magic, bytes of weights, sha256 of name, size and CRCs
_MAGIC = b"TWOSTROKE-PACK-2"
_CHUNK_BYTES = 1 << 20
"""What one CRC of the trailer covers."""
_SAMPLE_BYTES = 64
LEAST_BYTES = 4 << 20
"""A smaller model is packed sooner than its entry is looked for."""
_FORMS_KEPT = 3
"""Entries of one source that are kept: a choice or two of `quantise`, and another version of this program."""
_FOLDER_LIMIT_BYTES = 20 * 10**9
_SHARE_OF_FREE_DISK = 0.5
_ABANDONED_AFTER_S = 3600.0
"""A file that was being written this long ago was left by a process that was killed."""


class DamagedEntryError(Exception):
    """An entry is there, and it is not what was written."""


def entry_path(checkpoint: Checkpoint, weights: str = STORED) -> Path | None:
    """Where these weights are kept in the form they are held in; None when no file says what they are, and for a model
    too small to be worth it."""
    tensors = checkpoint.tensors
    if not isinstance(tensors, FileTensors) or checkpoint.held_bytes(weights) < LEAST_BYTES:
        return None
    source, form = hashlib.sha256(), hashlib.sha256(_builder_identity())
    try:
        for file in tensors.files:
            status = file.stat()
            source.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError:
        return None
    for name, tensor in tensors.items():
        held = checkpoint.held_kind(name, weights)
        form.update(f"{name}\0{tensor.kind.name}\0{held.name}\0{tensor.shape}\0".encode())
        # A file that was changed under its old size and time is told by what is in it, as far as a glance goes.
        form.update(tensor.glance(_SAMPLE_BYTES))
    return _folder() / f"{source.hexdigest()[:24]}-{form.hexdigest()[:24]}"


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
    temporary: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if len(data) > _SHARE_OF_FREE_DISK * free:
            return f"they take {len(data) / 1e6:,.1f} MB, and the disk of {path.parent} has {free / 1e6:,.1f} MB left"
        # A name of its own until all is on the disk: a killed process or a second one leaves the entry whole or absent.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            file.write(data.data)
            crcs = _crcs(data, threads)
            file.write(crcs + _trailer(path, len(data), crcs))
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


def _folder() -> Path:
    return cache_folder() / "packed"


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


@cache
def _builder_identity() -> bytes:
    """What decides the bytes beside the files: the sources that read, quantise and pack them."""
    own, models = Path(__file__).parent, Path(checkpoint_module.__file__).parent
    packing = ("packing.py", "parts_packing.py", "row_numbers.py", "tile_kinds.py", "weights.py", "memory.py")
    sources = [*(own / name for name in packing), *models.rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((arguments.TILE_OUTPUTS, arguments.PANEL_OUTPUTS)).encode())
    return digest.digest()
