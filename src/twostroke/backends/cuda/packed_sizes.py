"""Which matrices of a model have a copy in twelve bits for decode, and what the copies take. Knows shapes and rules, no
torch and no device at hand: `packed_copies.py` asks for the card under us, a plan for one elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from twostroke.backends.cuda.kernels.packed_format import DEPTH, can_pack, packed_bytes, units_of
from twostroke.backends.cuda.kernels.packed_tiles import (
    MAX_AVERAGE_ROWS,
    MAX_DENSE_ROWS,
    MAX_EXPERTS,
    MIN_WEIGHTS,
    choose_packed_tile,
)
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights, WeightCopies
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import DenseMlp, ModelSpec, expert_name, layer_name

DENSE = ("qkv", "o", "gate_up", "down")
"""Matrices of a layer without experts."""
SPLIT = ("o", "down")
"""Products whose readers add up parts of the depth."""
SMALL_MATRIX = 1 << 24
FEW_ROWS_OF_SMALL, FEW_ROWS_OF_LARGE = 8, 2
"""Up to so many tokens the fused kernels of a layer are faster than products with norms and sums beside them: by the
weights of an MLP's matrix (`bench/cuda/layer.py`, `bench/cuda/step_profile.py`)."""
NEEDS_BF16 = "packed weights are bf16 in fewer bits, and this computes in f16"
NEEDS_HOPPER = "products with packed weights need a Hopper GPU (compute capability 9.0)"


@dataclass(frozen=True, slots=True)
class Packable:
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

    def is_read(self, num_sms: int | None) -> bool:
        """Whether products take a copy of it, on a device of so many multiprocessors; None: on any."""
        if not can_pack(self.shape, is_gated=self.is_gated):
            return False
        if self.is_expert:
            return self.shape[0] <= MAX_EXPERTS
        if num_sms is None:
            return prod(self.shape) >= MIN_WEIGHTS
        size = units_of(self.shape[0]), self.shape[1] // DEPTH
        return choose_packed_tile(1, *size, num_sms, gated=self.is_gated, may_split=self.name in SPLIT) is not None


def packable_head(spec: ModelSpec, num_sms: int | None = None) -> Packable | None:
    head = Packable("head", (spec.vocab_size, spec.hidden_size), ("embedding" if spec.tied_embeddings else "output",))
    return head if head.is_read(num_sms) else None


def packable(spec: ModelSpec, num_sms: int | None = None) -> list[Packable]:
    """Those of a layer that products read packed, were it in bf16. Products with a bias are cuBLAS's, which reads
    plain matrices; of small matrices plain ones are as good."""
    hidden, attention, mlp = spec.hidden_size, spec.layers[0].grouped, spec.layers[0].mlp  # all layers are alike
    query_dim = attention.query_width
    found: list[Packable] = []
    if not attention.qkv_bias:
        found.append(Packable("qkv", (query_dim + attention.kv_values, hidden), ("q", "k", "v")))
    if not attention.output_bias:
        found.append(Packable("o", (hidden, query_dim), ("o",)))
    if isinstance(mlp, DenseMlp):
        found.append(Packable("gate_up", (2 * mlp.intermediate_size, hidden), ("gate", "up"), is_gated=True))
        found.append(Packable("down", (hidden, mlp.intermediate_size), ("down",)))
    else:
        experts, width = range(mlp.num_experts), mlp.expert_intermediate_size
        gates = tuple(expert_name(expert, name) for expert in experts for name in ("gate", "up"))
        downs = tuple(expert_name(expert, "down") for expert in experts)
        found.append(Packable("gate_up", (len(experts), 2 * width, hidden), gates, is_gated=True, is_expert=True))
        found.append(Packable("down", (len(experts), hidden, width), downs, is_expert=True))
    return [matrix for matrix in found if matrix.is_read(num_sms)]


def few_rows_of(spec: ModelSpec, *, is_whole: bool) -> int:
    """Up to how many tokens the fused kernels take a step; they read plain matrices. `is_whole`: all of a layer's have
    copies, and reading a quarter less of everything is better than what fusing saves."""
    if spec.moe is not None or spec.hidden_size * spec.dense_width < SMALL_MATRIX:
        return FEW_ROWS_OF_SMALL
    return 0 if is_whole else FEW_ROWS_OF_LARGE


def offered_on(checkpoint: Checkpoint, formats: Formats, hopper_sms: int | None) -> DecodeWeights | str:
    """What copies for decode take on a Hopper card of so many multiprocessors (None: on another card) and spare its
    steps; or why there can be none."""
    if formats.weights != "bf16":
        return NEEDS_BF16
    return NEEDS_HOPPER if hopper_sms is None else sizes_of(checkpoint, hopper_sms)


def sizes_of(checkpoint: Checkpoint, num_sms: int | None = None) -> DecodeWeights | str:
    """The same of a checkpoint in bf16, on any device that can multiply with them."""
    spec, matrices = checkpoint.spec, packable(checkpoint.spec, num_sms)
    if not matrices:
        return "no matrix of this model has a size and shape that products with packed weights take"
    dense = [matrix for matrix in matrices if not matrix.is_expert]
    experts, moe = [matrix for matrix in matrices if matrix.is_expert], spec.moe
    dense_bytes, replaced_bytes = _in_layers(checkpoint, dense)
    head = packable_head(spec, num_sms)
    head_bytes = head.num_bytes if head is not None else 0
    head_replaced_bytes = checkpoint.held_tensor_bytes(*head.tensors) if head is not None else 0
    few_rows = 0 if spec.layers[0].sandwich_norms else few_rows_of(spec, is_whole=len(dense) == len(DENSE))
    copies = WeightCopies(
        dense_bytes + head_bytes,
        replaced_bytes + head_replaced_bytes,
        MAX_DENSE_ROWS,
        plain_tokens=few_rows,
        head_bytes=head_bytes,
        head_replaced_bytes=head_replaced_bytes,
    )
    return DecodeWeights(
        copies if copies.num_bytes else None,
        WeightCopies(*_in_layers(checkpoint, experts), MAX_AVERAGE_ROWS * moe.num_experts // moe.experts_per_token)
        if experts and moe is not None
        else None,
    )


def _in_layers(checkpoint: Checkpoint, matrices: Sequence[Packable]) -> tuple[int, int]:
    """Bytes of copies, and of what they are copies of."""
    layers = checkpoint.spec.num_layers
    replaced_bytes = sum(
        checkpoint.held_tensor_bytes(layer_name(layer, name))
        for matrix in matrices
        for name in matrix.tensors
        for layer in range(layers)
    )
    return layers * sum(matrix.num_bytes for matrix in matrices), replaced_bytes
