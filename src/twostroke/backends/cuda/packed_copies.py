"""Copies of the layers' matrices in twelve bits, for decode: whether this device can have them, and how they are filled
once the weights are there. Which matrices have one is `packed_sizes.py`'s to say; knows no product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda import native
from twostroke.backends.cuda.compile_ahead import is_rehearsal
from twostroke.backends.cuda.kernels.packed_weights import PackedMatrix
from twostroke.backends.cuda.kernels.packing import pack_by_kernel
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.packed_sizes import NEEDS_BF16, NEEDS_HOPPER, Packable, packable, packable_head, sizes_of
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import ModelSpec, layer_name

if TYPE_CHECKING:
    from twostroke.backends.cuda.weights import Weights


@dataclass(slots=True, eq=False)
class PackedLayer:
    """The copies of a layer; None: decode reads the matrix itself. Whether a matrix can be packed shows only when its
    weights are there, after the model was made: so whoever multiplies asks here each time, and keeps none."""

    qkv: PackedMatrix | None = None
    o: PackedMatrix | None = None
    gate_up: PackedMatrix | None = None
    """Of an MLP, or of all experts: [experts, ...]."""
    down: PackedMatrix | None = None

    @staticmethod
    def empty(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> PackedLayer:
        """Room for every copy that there can be."""
        return PackedLayer(
            **{
                matrix.name: PackedMatrix.empty(matrix.shape, device, is_gated=matrix.is_gated)
                for matrix in _packable_on(spec, dtype, device)
            }
        )

    @property
    def is_whole(self) -> bool:
        """Whether every matrix has a copy."""
        return None not in (self.qkv, self.o, self.gate_up, self.down)

    @property
    def num_bytes(self) -> int:
        copies = (self.qkv, self.o, self.gate_up, self.down)
        return sum(copy.num_bytes for copy in copies if copy is not None)


@dataclass(slots=True, eq=False)
class PackedHead:
    """The same of a model's head, where layers have copies: of small models it was not measured."""

    head: PackedMatrix | None = None

    @staticmethod
    def empty(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> PackedHead:
        head = packable_head(spec, _sms_of(device)) if _packable_on(spec, dtype, device) else None
        return PackedHead(None if head is None else PackedMatrix.empty(head.shape, device))


def _sms_of(device: torch.device | str) -> int | None:
    target = target_of(device)
    return target.num_sms if target.is_hopper else None


def _packable_on(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> list[Packable]:
    return packable(spec, _sms_of(device)) if dtype == torch.bfloat16 else []


def decode_weights(checkpoint: Checkpoint, formats: Formats) -> DecodeWeights | str:
    """What copies for decode take on the current device and spare its steps; or why there can be none."""
    if formats.weights != "bf16":
        return NEEDS_BF16
    if not target_of("cuda").is_hopper:
        return NEEDS_HOPPER
    reason = native.why_not()
    if reason is not None:
        return f"products with packed weights have to be compiled, and {reason}"
    return sizes_of(checkpoint, target_of("cuda").num_sms)


def fill(weights: Weights) -> tuple[str, ...]:
    """Pack all weights that have room for a copy. Returns the matrices that stay plain, since their weights are not
    all finite: those copies are dropped. A rehearsal goes through one layer: all launch the same."""
    copies = list(_places(weights))
    for copy in copies:
        pack_by_kernel(copy.weight, copy.place)
    if is_rehearsal() or not copies:
        return ()
    # A row whose largest exponent is infinity's has an infinite factor. All are asked about at once: asking is waiting.
    are_finite = torch.stack([copy.place.factors.isfinite().all() for copy in copies]).tolist()
    left_plain: list[str] = []
    for copy, is_finite in zip(copies, are_finite, strict=True):
        if not is_finite:
            setattr(copy.holder, copy.name, None)
            left_plain.append(copy.label)
    return tuple(left_plain)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    holder: PackedLayer | PackedHead
    name: str
    label: str
    weight: torch.Tensor
    place: PackedMatrix


def _places(weights: Weights) -> Iterator[_Copy]:
    for index, layer in enumerate(weights.layers[:1] if is_rehearsal() else weights.layers):
        matrices = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        for name, weight in matrices.items():
            place = getattr(layer.packed, name, None)
            if layer.packed is not None and place is not None:
                yield _Copy(layer.packed, name, layer_name(index, name), weight, place)
    if weights.packed_head.head is not None:
        yield _Copy(weights.packed_head, "head", "head", weights.head, weights.packed_head.head)
