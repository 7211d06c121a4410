"""Packed weights kept on disk, so that a model is repacked and quantised once (`backends/host/kept_weights.py`): which
entry is these weights', by their files, by what they are held in, and by the code that packs them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from twostroke.backends.cpu import arguments
from twostroke.backends.host.kept_weights import DamagedEntryError, discard, glances, read, source_of, write
from twostroke.cache import cache_folder
from twostroke.core.formats import STORED
from twostroke.models import checkpoint as checkpoint_module
from twostroke.models.checkpoint import Checkpoint

__all__ = ("LEAST_BYTES", "DamagedEntryError", "discard", "entry_path", "read", "write")

LEAST_BYTES = 4 << 20
"""A smaller model is packed sooner than its entry is looked for."""
PLACING = ("weights.py", "held_kinds.py", "latent_weights.py", "recurrent_shape.py", "memory.py")
PACKING = ("packing.py", "parts_packing.py", "row_numbers.py", "tile_kinds.py")


def entry_path(checkpoint: Checkpoint, weights: str = STORED) -> Path | None:
    """Where these weights are kept in the form they are held in; None when no file says what they are, and for a model
    too small to be worth it."""
    source = source_of(checkpoint)
    if source is None or checkpoint.held_bytes(weights) < LEAST_BYTES:
        return None
    form = hashlib.sha256(_builder_identity())
    for name, glance in zip(checkpoint.tensors, glances(checkpoint), strict=True):
        form.update(f"{checkpoint.held_kind(name, weights).name}\0".encode() + glance)
    return _folder() / f"{source}-{form.hexdigest()[:24]}"


def _folder() -> Path:
    return cache_folder() / "packed"


@cache
def _builder_identity() -> bytes:
    """What decides the bytes beside the files: the sources that read, quantise and pack them."""
    own, models = Path(__file__).parent, Path(checkpoint_module.__file__).parent
    sources = [*(own / name for name in PLACING + PACKING), *models.rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((arguments.TILE_OUTPUTS, arguments.PANEL_OUTPUTS)).encode())
    return digest.digest()
