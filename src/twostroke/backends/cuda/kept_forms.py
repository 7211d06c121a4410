"""Matrices that were brought to few bits as they were loaded, kept on disk and mapped by the next start: which entry is
theirs, and how their tensors lie in it. What is stored in few bits already has its own file."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from twostroke.backends.cuda.kernels import packed_format
from twostroke.backends.cuda.matrix import LowBitMatrix
from twostroke.backends.cuda.stored_codes import Held
from twostroke.backends.host.kept_weights import (
    Bytes,
    DamagedEntryError,
    glances,
    read,
    source_of,
    write_parts,
)
from twostroke.cache import cache_folder
from twostroke.models import checkpoint as checkpoint_module
from twostroke.models.checkpoint import Checkpoint

LEAST_BYTES = 4 << 20
"""A smaller model is quantised sooner than its entry is looked for."""


def entry_path(checkpoint: Checkpoint, held: Held, forms: Sequence[LowBitMatrix]) -> Path | None:
    """None where there is nothing to keep, or where no file says what the weights are."""
    source = source_of(checkpoint)
    if source is None or checkpoint.has_quantised_matrices or num_bytes_of(forms) < LEAST_BYTES:
        return None
    form = hashlib.sha256(_builder_identity())
    for name, code in held.codes.items():
        form.update(f"{name}\0{code.name}\0".encode())
    for glance in glances(checkpoint):
        form.update(glance)
    return cache_folder() / "packed" / f"{source}-{form.hexdigest()[:24]}"


def num_bytes_of(forms: Sequence[LowBitMatrix]) -> int:
    return sum(form.num_bytes for form in forms)


def fill_from(path: Path, forms: Sequence[LowBitMatrix], threads: int) -> bool:
    """Whether the entry is there: then the forms are filled from it. Raises DamagedEntryError."""
    kept = read(path, num_bytes_of(forms), threads)
    if kept is None:
        return False
    start = 0
    for tensor in _tensors(forms):
        _put(kept[start : start + tensor.nbytes], tensor)
        start += tensor.nbytes
    return True


def keep(path: Path, forms: Sequence[LowBitMatrix], threads: int) -> str | None:
    """None, or why that is not possible. One tensor at a time is on the host."""
    parts = (tensor.detach().contiguous().cpu().view(torch.uint8).flatten().numpy() for tensor in _tensors(forms))
    return write_parts(path, parts, num_bytes_of(forms), threads)


def _tensors(forms: Sequence[LowBitMatrix]) -> Iterator[torch.Tensor]:
    for form in forms:
        found = (getattr(form, name, None) for name in ("data", "highs", "scales", "offsets", "factors", "order"))
        yield from (tensor for tensor in found if isinstance(tensor, torch.Tensor))


def _put(kept: Bytes, tensor: torch.Tensor) -> None:
    """By its address: torch warns of memory that cannot be written to."""
    held = np.ascontiguousarray(kept)
    memory = (ctypes.c_char * held.nbytes).from_address(held.ctypes.data)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.view(torch.uint8).view(-1).copy_(flat)


@cache
def _builder_identity() -> bytes:
    """What decides the bytes beside the files: the sources that read, quantise and lay them out."""
    own, models = Path(__file__).parent, Path(checkpoint_module.__file__).parent
    kernels = Path(packed_format.__file__).parent
    names = ("block_rounding", "eight_bits", "expert_numbers", "expert_units", "four_bits", "grouped_numbers")
    forms = [kernels / f"{name}.py" for name in (*names, "packed_format", "row_forms", "unit_order")]
    digest = hashlib.sha256()
    for path in sorted([*forms, own / "weights.py", own / "kept_forms.py", *models.rglob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


__all__ = ("LEAST_BYTES", "DamagedEntryError", "entry_path", "fill_from", "keep", "num_bytes_of")
