"""What kind of block each matrix is packed from, and how many bytes it then takes. An expert's gate and up are one
product: where they would lie in tiles of two kinds, both are rounded to 8 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from twostroke.backends.cpu.latent_weights import is_plain
from twostroke.backends.cpu.memory import LINE_BYTES, padded
from twostroke.backends.cpu.packing import ROUNDED_TO, held_block, packed_bytes, tile_kind
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.core.formats import STORED
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind

_PARTNERS = {"gate": "up", "up": "gate"}


def tile_kinds(checkpoint: Checkpoint, weights: str = STORED) -> tuple[TileKind, ...]:
    """The kinds of tile that a model needs, in a fixed order. `weights`, here and below: as in Formats."""
    found = {tile_kind(block_of(checkpoint, name, weights)) for name in packed_names(checkpoint)}
    return tuple(kind for kind in TileKind if kind in found)


def packed_names(checkpoint: Checkpoint) -> Iterator[str]:
    """The matrices that are tiles."""
    return (name for name in checkpoint.tensors if checkpoint.is_multiplied(name) and not is_plain(name))


def held_bytes(checkpoint: Checkpoint, name: str, weights: str = STORED) -> int:
    """What a matrix takes of an arena, joined to others or not."""
    outputs, depth = checkpoint.tensors[name].shape
    return padded(packed_bytes(tile_kind(block_of(checkpoint, name, weights)), outputs, depth), LINE_BYTES)


def block_of(checkpoint: Checkpoint, name: str, weights: str = STORED) -> WeightKind:
    return ROUNDED_TO if is_rounded(checkpoint, name, weights) else _own_block(checkpoint, name, weights)


def is_rounded(checkpoint: Checkpoint, name: str, weights: str = STORED) -> bool:
    """Whether a matrix that would lie in tiles of another kind is rounded for the sake of its partner."""
    partner = _partner(checkpoint, name)
    if partner is None:
        return False
    own, other = (_own_block(checkpoint, one, weights) for one in (name, partner))
    return tile_kind(own) is not tile_kind(other) and own is not ROUNDED_TO


def mixed(checkpoint: Checkpoint, weights: str) -> str | None:
    """See `Formats.mixed`."""
    kept, brought = Counter[str](), Counter[str]()
    for name in checkpoint.float_matrices():
        brought[checkpoint.held_kind(name, weights).name] += prod(checkpoint.tensors[name].shape)
    if weights == STORED or not brought:
        return None
    for name, tensor in checkpoint.tensors.items():
        if tensor.kind.is_quantised and checkpoint.is_multiplied(name):
            kept[tensor.kind.name] += prod(tensor.shape)
    if not kept:
        return None
    ((most, _), *others) = kept.most_common()
    stored = f"{most} and others" if others else most
    return f"{stored} as stored, the rest in {' and '.join(kind for kind, _ in brought.most_common())}"


def _own_block(checkpoint: Checkpoint, name: str, weights: str) -> WeightKind:
    return held_block(checkpoint.tensors[name], checkpoint.held_kind(name, weights))


def _partner(checkpoint: Checkpoint, name: str) -> str | None:
    """What an expert's matrix is one product with."""
    place, _, part = name.rpartition(".")
    if ".experts." not in place or part not in _PARTNERS:
        return None
    partner = f"{place}.{_PARTNERS[part]}"
    return partner if partner in checkpoint.tensors else None
