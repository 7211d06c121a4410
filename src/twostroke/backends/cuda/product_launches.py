"""How each kernel of dense products is launched, and the room that one leaves numbers in for the next. Which of them
multiplies is not known here: `products.py` asks the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from twostroke.backends.cuda.kernels.activation import Activation, gated
from twostroke.backends.cuda.kernels.cluster_products import cluster_product
from twostroke.backends.cuda.kernels.eight_bits import E4M3, EightBitMatrix, quantise_rows
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.float8_products import Float8Rows, Float8Weights, float8_matmul, library_matmul
from twostroke.backends.cuda.kernels.float8_room import RowRoom, padded_width, weights_in_float8
from twostroke.backends.cuda.kernels.float8_tiles import ROW_GROUP, float8_bytes, scale_group, whole_fours
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix, dequantise_into
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, dequantise_grouped_into
from twostroke.backends.cuda.kernels.packed_format import FP8, GROUPED_CODES, LOW_BIT_CODES, LOW_BIT_DEPTH
from twostroke.backends.cuda.kernels.packed_products import packed_product
from twostroke.backends.cuda.kernels.product import MAX_PART_ROWS
from twostroke.backends.cuda.kernels.product_kernels import DENSE_IN_FLOAT8, LIBRARY_IN_FLOAT8
from twostroke.backends.cuda.layer_matrices import matrices_of, widest_mlp
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.stored_codes import AS_COMPUTED, Held
from twostroke.models.spec import ModelSpec


class ProductScratch:
    """Room for what a product leaves for the kernel behind it, and for what weights and rows are brought to for it;
    layers run one after another and share it."""

    def __init__(
        self, spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device, held: Held = AS_COMPUTED
    ) -> None:
        """`held`: how layers' matrices are held."""
        self.found = torch.zeros(num_tokens, spec.hidden_size, dtype=dtype, device=device)
        self.sums = torch.zeros(MAX_PART_ROWS * spec.hidden_size, dtype=torch.float32, device=device)
        products = {matrix.product for matrix in matrices_of(spec) if matrix.kind != "head"}
        dense = [product.shape for product in products if not product.experts]
        shapes = dense if held.dense_codes else [(0, 0)]
        in_eights = (float8_bytes(shape, code) for shape in shapes for code in held.float8_codes)
        numbers = max(*(prod(shape) for shape in shapes), -(-max(in_eights, default=0) // dtype.itemsize))
        self.unpacked = torch.zeros(numbers, dtype=dtype, device=device)
        widest, tallest, in_fours = max(shape[-1] for shape in shapes), 2 * widest_mlp(spec), num_tokens
        if any(scale_group(code) == ROW_GROUP for code in held.float8_codes):  # as the library takes them
            tallest, in_fours = max(tallest, *(shape[-2] for shape in shapes)), whole_fours(num_tokens)
        self.results = torch.zeros(in_fours * tallest, dtype=dtype, device=device)
        self.ordered = torch.zeros(num_tokens * widest if held.with_order else 0, dtype=dtype, device=device)
        width = FP8.rounds(widest) * LOW_BIT_DEPTH if FP8 in held.codes.values() else 0
        self.eights = torch.zeros(num_tokens * width, dtype=torch.uint8, device=device)
        self.eight_scales = torch.zeros(num_tokens if width else 0, dtype=torch.float32, device=device)
        self.rounded = RowRoom(in_fours * padded_width(widest) if held.float8_codes else 0, device)

    def room(self, num_rows: int, outputs: int) -> torch.Tensor:
        """For what a product finds on the way to its result: gates and ups, or rows that are nobody's, too"""
        return self.results[: num_rows * outputs].view(num_rows, outputs)

    def gates_of(self, out: torch.Tensor) -> torch.Tensor:
        """Room for the gates and ups of a result  # [num_rows, 2 * outputs]"""
        return self.room(len(out), 2 * out.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a kernel is launched with."""

    x: torch.Tensor  # [num_rows, width]
    matrix: Matrix
    out: torch.Tensor  # [num_rows, outputs], or [parts, num_rows, outputs] in float32
    tile: Any  # the kernel's own
    scratch: ProductScratch
    num_sms: int
    gated: Activation | None


def _by_cublas(call: Call) -> None:
    _multiply_plain(call, call.matrix.weight)


def _multiply_plain(call: Call, weight: torch.Tensor) -> None:
    """weight: [outputs, width] in the type that is computed in"""
    x, out, bias, weight = call.x, call.out, call.matrix.bias, weight.t()
    if call.gated is not None:
        gate_up = call.scratch.gates_of(out)
        torch.mm(x, weight, out=gate_up)
        gated(gate_up, out, kind=call.gated)
    elif bias is not None:
        torch.addmm(bias, x, weight, out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight, out=out)
    elif x.is_cuda:  # in 16 bits many of a vocabulary's logits would be equal
        torch.mm(x, weight, out_dtype=out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), weight.to(out.dtype), out=out)


def _by_clusters(call: Call) -> None:
    cluster_product(call.x, call.matrix.weight, call.out, tile=call.tile, num_sms=call.num_sms, gated=call.gated)


def _from_packed(call: Call) -> None:
    assert call.matrix.packed is not None
    packed_product(call.x, call.matrix.packed, call.out, tile=call.tile, num_sms=call.num_sms, gated=call.gated)


def _in_order(call: Call) -> torch.Tensor:
    """The rows, with their inputs as the weights have theirs."""
    weight, x = call.matrix.low_bit, call.x
    if not isinstance(weight, GroupedMatrix) or weight.order is None:
        return x
    return torch.index_select(x, 1, weight.order, out=call.scratch.ordered[: x.numel()].view(x.shape))


def _from_low_bit(call: Call) -> None:
    x, weight = _in_order(call), call.matrix.low_bit
    assert not isinstance(weight, ExpertMatrix | ExpertUnits)
    packed_product(x, weight, call.out, tile=call.tile, num_sms=call.num_sms, gated=call.gated)
    if (bias := call.matrix.bias) is not None:
        (call.out if call.out.dim() == 2 else call.out[0]).add_(bias)


def _by_unpacking(call: Call) -> None:
    weight, shape = call.matrix.low_bit, call.matrix.product.shape
    if prod(shape) > call.scratch.unpacked.numel():
        _by_slices(call)
        return
    unpacked = call.scratch.unpacked[: prod(shape)].view(shape)
    if isinstance(weight, GroupedMatrix):
        dequantise_grouped_into(weight, unpacked)
    elif isinstance(weight, FourBitMatrix):
        dequantise_into(weight, unpacked)
    else:
        unpacked.copy_(weight.dequantised())
    _multiply_plain(replace(call, x=_in_order(call)), unpacked)


def _by_slices(call: Call) -> None:
    """Of a head, which is larger than any matrix of a layer: as many outputs at a time as there is room for."""
    weight, room = call.matrix.low_bit, call.scratch.unpacked
    assert isinstance(weight, GroupedMatrix) and call.gated is None and call.matrix.bias is None
    for first, part in weight.slices(room.numel() // weight.width):
        unpacked = room[: part.rows * part.width].view(part.rows, part.width)
        dequantise_grouped_into(part, unpacked)
        _multiply_plain(replace(call, out=call.out[:, first : first + part.rows]), unpacked)


def _by_scaling(call: Call) -> None:
    weight, x, scratch, out = call.matrix.low_bit, call.x, call.scratch, call.out
    assert isinstance(weight, EightBitMatrix)
    width = weight.data.shape[1]
    eights, scales = scratch.eights[: len(x) * width].view(-1, width), scratch.eight_scales[: len(x)]
    quantise_rows(x, eights, scales)
    found = out if call.gated is None else scratch.gates_of(out)
    left, right = eights.view(E4M3), weight.data.view(E4M3).t()
    if x.is_cuda:  # fast sums would be kept in fewer bits than float32 has
        torch._scaled_mm(
            left, right, scales[:, None], weight.scales[None, :], out_dtype=found.dtype, use_fast_accum=False, out=found
        )
    else:
        found.copy_(left.float() @ right.float() * scales[:, None] * weight.scales)
    if (bias := call.matrix.bias) is not None:
        found.add_(bias)
    if call.gated is not None:
        gated(found, out, kind=call.gated)


def _in_float8(call: Call) -> None:
    matrix, bias = call.matrix, call.matrix.bias
    weights, rows = _weights_and_rows_in_float8(call)
    float8_matmul(rows, weights, call.out, tile=call.tile, bias=bias, gated=call.gated, has_up=matrix.product.is_gated)


def _in_float8_by_library(call: Call) -> None:
    weights, rows = _weights_and_rows_in_float8(call, in_fours=True)
    out, (num_rows, outputs) = call.out, (len(rows.data), weights.data.shape[1])
    is_whole = call.gated is None and num_rows == len(out)
    found = out if is_whole else call.scratch.room(num_rows, outputs)
    library_matmul(rows, weights, found)
    found = found[: len(out)]
    if (bias := call.matrix.bias) is not None:
        found.add_(bias)
    if call.gated is not None:
        gated(found, out, kind=call.gated)
    elif not is_whole:
        out.copy_(found)


def _weights_and_rows_in_float8(call: Call, *, in_fours: bool = False) -> tuple[Float8Weights, Float8Rows]:
    weight, scratch = call.matrix.low_bit, call.scratch
    assert isinstance(weight, FourBitMatrix | GroupedMatrix)
    rows = scratch.rounded.rounded(_in_order(call), in_fours=in_fours)
    return weights_in_float8(weight, scratch.unpacked), rows


LAUNCHES: dict[str, Callable[[Call], None]] = {
    "cublas": _by_cublas,
    "cluster": _by_clusters,
    "packed": _from_packed,
    "scaled": _by_scaling,
    **{code.name: _from_low_bit for code in (*LOW_BIT_CODES, *GROUPED_CODES)},
    **{f"{code.name}_unpacked": _by_unpacking for code in (*LOW_BIT_CODES, *GROUPED_CODES)},
    **{kernel.name: _in_float8 for kernel in DENSE_IN_FLOAT8},
    **{kernel.name: _in_float8_by_library for kernel in LIBRARY_IN_FLOAT8},
}
"""By the kernels' names; those that fuse are called where they do."""
