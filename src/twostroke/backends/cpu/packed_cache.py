"""Packed weights kept on disk, so that a model is repacked and quantised once: `cache_folder()/packed/SOURCE-FORM`, the
bytes of the arena and behind them what proves them whole. An entry that is not whole, or is of other files, is packed
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
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu import arguments
from twostroke.backends.cpu.memory import Bytes
from twostroke.cache import cache_folder
from twostroke.models import checkpoint as checkpoint_module
from twostroke.models.checkpoint import Checkpoint, FileTensors

_TRAILER = struct.Struct("<16sQ32s")  # magic, bytes of weights, sha256 of name, size and sums
_MAGIC = b"TWOSTROKE-PACK-1"
_CHUNK_BYTES = 1 << 20
"""What one sum of the trailer covers."""
_SAMPLE_BYTES = 64
LEAST_BYTES = 4 << 20
"""A smaller model is packed sooner than its entry is looked for."""
_FORMS_KEPT = 3
"""Entries of one source that are kept: a choice or two of `quantise`, and another version of this program."""
_FOLDER_LIMIT_BYTES = 20 * 10**9
_SHARE_OF_FREE_DISK = 0.5
_ABANDONED_AFTER_S = 3600.0
"""A file that was being written this long ago was left by a process that was killed."""

Sums = npt.NDArray[np.uint64]


def entry_path(checkpoint: Checkpoint) -> Path | None:
    """Where these weights are kept in the form they are held in; None when no file says what they are, and for a model
    too small to be worth it."""
    tensors = checkpoint.tensors
    if not isinstance(tensors, FileTensors) or checkpoint.held_bytes < LEAST_BYTES:
        return None
    source, form = hashlib.sha256(), hashlib.sha256(_builder_identity())
    try:
        for file in tensors.files:
            status = file.stat()
            source.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError:
        return None
    for name, tensor in tensors.items():
        form.update(f"{name}\0{tensor.kind.name}\0{checkpoint.held_kind(name).name}\0{tensor.shape}\0".encode())
        # A file that was changed under its old size and time is told by what is in it, as far as a glance goes.
        form.update(tensor.data[0, :_SAMPLE_BYTES].tobytes() + tensor.data[-1, -_SAMPLE_BYTES:].tobytes())
    return _folder() / f"{source.hexdigest()[:24]}-{form.hexdigest()[:24]}"


def read(path: Path, num_bytes: int) -> Bytes | None:
    """An entry's weights, read-only in the page cache, which all processes share; None where it is not whole.

    They are mapped, not read into huge pages of our own: decode is as fast either way (see bench/results/startup.md),
    a start does not copy them, and a second engine costs no second copy. Every byte is summed all the same: that is as
    fast as memory can be read, where a sha256 of all would take as long as packing anew; and it brings the pages in."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes + _sum_bytes(num_bytes) + _TRAILER.size:
                return None
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        memory.madvise(mmap.MADV_WILLNEED)
    whole = np.frombuffer(memory, dtype=np.uint8)
    data, rest = whole[:num_bytes], whole[num_bytes:]
    stored = rest[: -_TRAILER.size].tobytes()
    if rest[-_TRAILER.size :].tobytes() != _trailer(path, num_bytes, stored):
        return None
    if _sums(data).tobytes() != stored:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: the folder is cleared of what was not used for longest
    return data


def write(path: Path, data: Bytes) -> str | None:
    """Keep packed weights; None, or why that is not possible."""
    temporary: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if len(data) > _SHARE_OF_FREE_DISK * free:
            return f"they take {len(data)} bytes, and the disk of {path.parent} has {free} left"
        # A name of its own until all is on the disk: a killed process or a second one leaves the entry whole or absent.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            file.write(data.data)
            sums = _sums(data).tobytes()
            file.write(sums + _trailer(path, len(data), sums))
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


def _trailer(path: Path, num_bytes: int, sums: bytes) -> bytes:
    proof = hashlib.sha256(path.name.encode() + struct.pack("<Q", num_bytes) + sums).digest()
    return _TRAILER.pack(_MAGIC, num_bytes, proof)


def _sum_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _CHUNK_BYTES) * 8


def _sums(data: Bytes) -> Sums:
    """The sum of each chunk's 64-bit words: any one wrong word, page or sector changes it."""
    words: Sums = data.view(np.uint64)  # arenas are whole lines
    step = _CHUNK_BYTES // 8
    return np.array([np.add.reduce(words[first : first + step]) for first in range(0, len(words), step)], np.uint64)


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
    sources = [own / "packing.py", own / "weights.py", own / "memory.py", *models.rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    kinds = [(kind.name, kind.group_values, kind.group_bytes) for kind in arguments.TileKind]
    digest.update(repr((kinds, arguments.TILE_OUTPUTS, arguments.PANEL_OUTPUTS)).encode())
    return digest.digest()
