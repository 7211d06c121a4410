"""Copies of the layers' matrices in twelve bits, for decode: which matrices have one, what they take, and how they are
filled once the weights are there. Knows shapes and the format's name; knows no product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda import native
from twostroke.backends.cuda.compile_ahead import is_rehearsal
from twostroke.backends.cuda.kernels.packed_tiles import (
    MAX_AVERAGE_ROWS,
    MAX_DENSE_ROWS,
    MAX_EXPERTS,
    MIN_WEIGHTS,
    choose_packed_tile,
)
from twostroke.backends.cuda.kernels.packed_weights import (
    DEPTH,
    PackedMatrix,
    can_pack,
    packed_bytes,
    units_of,
)
from twostroke.backends.cuda.kernels.packing import pack_by_kernel
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.cost.model_shape import DecodeWeights, WeightCopies
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import ModelSpec, expert_name, layer_name

SPLIT = ("o", "down")
"""Products whose readers add up parts of the depth."""

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
                for matrix in packable(spec, dtype, _sms_of(device))
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
        head, num_sms = _head(spec), _sms_of(device)
        has_copy = head.is_read(dtype, num_sms) and bool(packable(spec, dtype, num_sms))
        return PackedHead(PackedMatrix.empty(head.shape, device) if has_copy else None)


@dataclass(frozen=True, slots=True)
class _Packable:
    """A matrix of every layer that can have a copy."""

    name: str
    """PackedLayer's."""
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    """Of a layer, which it is made of."""
    is_gated: bool = False
    is_expert: bool = False

    @property
    def num_bytes(self) -> int:
        *experts, rows, depth = self.shape
        return prod(experts) * packed_bytes(rows, depth)

    def is_read(self, dtype: torch.dtype, num_sms: int | None) -> bool:
        """Whether products take a copy of it, on a device of so many multiprocessors; None: on any."""
        if not can_pack(self.shape, dtype, is_gated=self.is_gated):
            return False
        if self.is_expert:
            return self.shape[0] <= MAX_EXPERTS
        if num_sms is None:
            return prod(self.shape) >= MIN_WEIGHTS
        size = units_of(self.shape[0]), self.shape[1] // DEPTH
        return choose_packed_tile(1, *size, num_sms, gated=self.is_gated, may_split=self.name in SPLIT) is not None


def _head(spec: ModelSpec) -> _Packable:
    return _Packable("head", (spec.vocab_size, spec.hidden_size), ("embedding" if spec.tied_embeddings else "output",))


def _sms_of(device: torch.device | str) -> int | None:
    target = target_of(device)
    return target.num_sms if target.is_hopper else None


def packable(spec: ModelSpec, dtype: torch.dtype, num_sms: int | None = None) -> list[_Packable]:
    """Those of a layer that products read packed. Products with a bias are cuBLAS's, which reads plain matrices; of
    small matrices plain ones are as good."""
    hidden, query_dim = spec.hidden_size, spec.num_heads * spec.head_dim
    found: list[_Packable] = []
    if not spec.qkv_bias:
        found.append(_Packable("qkv", (query_dim + 2 * spec.num_kv_heads * spec.head_dim, hidden), ("q", "k", "v")))
    if not spec.output_bias:
        found.append(_Packable("o", (hidden, query_dim), ("o",)))
    if spec.moe is None:
        found.append(_Packable("gate_up", (2 * spec.intermediate_size, hidden), ("gate", "up"), is_gated=True))
        found.append(_Packable("down", (hidden, spec.intermediate_size), ("down",)))
    else:
        experts, width = range(spec.moe.num_experts), spec.moe.expert_intermediate_size
        gates = tuple(expert_name(expert, name) for expert in experts for name in ("gate", "up"))
        downs = tuple(expert_name(expert, "down") for expert in experts)
        found.append(_Packable("gate_up", (len(experts), 2 * width, hidden), gates, is_gated=True, is_expert=True))
        found.append(_Packable("down", (len(experts), hidden, width), downs, is_expert=True))
    return [matrix for matrix in found if matrix.is_read(dtype, num_sms)]


def decode_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> DecodeWeights | str:
    """What copies for decode take on the current device and spare its steps; or why there can be none."""
    if dtype != torch.bfloat16:
        return "packed weights are bf16 in fewer bits, and this computes in f16"
    if not target_of("cuda").is_hopper:
        return "products with packed weights need a Hopper GPU (compute capability 9.0)"
    reason = native.why_not()
    if reason is not None:
        return f"products with packed weights have to be compiled, and {reason}"
    return sizes_of(checkpoint, dtype, target_of("cuda").num_sms)


def sizes_of(checkpoint: Checkpoint, dtype: torch.dtype, num_sms: int | None = None) -> DecodeWeights | str:
    """The same on any device that can multiply with them."""
    spec, matrices = checkpoint.spec, packable(checkpoint.spec, dtype, num_sms)
    if not matrices:
        return "no matrix of this model has a size and shape that products with packed weights take"
    dense = [matrix for matrix in matrices if not matrix.is_expert]
    experts, moe = [matrix for matrix in matrices if matrix.is_expert], spec.moe
    dense_bytes, replaced_bytes = _in_layers(checkpoint, dense)
    head = _head(spec)
    if head.is_read(dtype, num_sms):
        dense_bytes += head.num_bytes
        replaced_bytes += checkpoint.held_tensor_bytes(*head.tensors)
    return DecodeWeights(
        WeightCopies(dense_bytes, replaced_bytes, MAX_DENSE_ROWS) if dense_bytes else None,
        WeightCopies(*_in_layers(checkpoint, experts), MAX_AVERAGE_ROWS * moe.num_experts // moe.experts_per_token)
        if experts and moe is not None
        else None,
    )


def _in_layers(checkpoint: Checkpoint, matrices: Sequence[_Packable]) -> tuple[int, int]:
    """Bytes of copies, and of what they are copies of."""
    layers = checkpoint.spec.num_layers
    replaced_bytes = sum(
        checkpoint.held_tensor_bytes(layer_name(layer, name))
        for matrix in matrices
        for name in matrix.tensors
        for layer in range(layers)
    )
    return layers * sum(matrix.num_bytes for matrix in matrices), replaced_bytes


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
