"""A layer's matrices times the rows of a step, with what stands between them: gates, norms, the residual stream. Which
kernel multiplies is the table's to say; knows how each is launched, and which take the norm ahead along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from twostroke.backends.cuda.kernels.activation import Activation, activate_rows, gated
from twostroke.backends.cuda.kernels.cluster_products import cluster_product
from twostroke.backends.cuda.kernels.eight_bits import E4M3, EightBitMatrix, quantise_rows
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.float8_products import Float8Rows, Float8Weights, float8_matmul, library_matmul
from twostroke.backends.cuda.kernels.float8_room import RowRoom, padded_width, weights_in_float8
from twostroke.backends.cuda.kernels.float8_tiles import ROW_GROUP, float8_bytes, scale_group, whole_fours
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix, dequantise_into
from twostroke.backends.cuda.kernels.gemv import linear_few
from twostroke.backends.cuda.kernels.gemv_config import GemvConfig
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, dequantise_grouped_into
from twostroke.backends.cuda.kernels.norms import add_rms_norm, layer_norm, rms_norm
from twostroke.backends.cuda.kernels.packed_format import FP8, GROUPED_CODES, LOW_BIT_CODES, LOW_BIT_DEPTH
from twostroke.backends.cuda.kernels.packed_products import packed_product
from twostroke.backends.cuda.kernels.product import MAX_PART_ROWS, Card
from twostroke.backends.cuda.kernels.product_kernels import CUBLAS, DENSE_IN_FLOAT8, LIBRARY_IN_FLOAT8
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.layer_matrices import activation_in, alone_in, matrices_of, widest_mlp
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.model_matrices import offered_on
from twostroke.backends.cuda.native import why_not
from twostroke.backends.cuda.stored_codes import AS_COMPUTED, Held, is_low_bit
from twostroke.backends.cuda.tuned_table import Choices, KernelChoice
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import ModelSpec

if TYPE_CHECKING:
    from twostroke.backends.cuda.layer_weights import AfterNorm
    from twostroke.backends.cuda.ranks import CardRanks

LONG_ROWS = 256
"""Steps of fewer rows are all launched at start; of the lengths beyond there are too many."""


def card_of(device: torch.device, dtype: torch.dtype) -> Card:
    target = target_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    is_able = target.is_hopper and dtype in (torch.bfloat16, torch.float16) and why_not() is None
    return Card(name, target.num_sms, is_able, target.has_float8, lacks_group_scales=target.lacks_group_scales)


def card_for(device: torch.device, dtype: torch.dtype, formats: Formats) -> Card:
    """As an engine's formats let it be used: its float8 is for rows that may be rounded."""
    card = card_of(device, dtype)
    has_float8 = card.has_float8 and formats.inputs_in_float8 is not False
    return replace(card, has_float8=has_float8, prefers_float8=formats.arithmetic == "fp8")


def decode_weights(checkpoint: Checkpoint, formats: Formats) -> DecodeWeights | str:
    """What copies for decode take on the current device and spare its steps; or why there can be none."""
    card = card_of(torch.device("cuda"), torch.bfloat16)
    is_asked = formats.weights == "bf16" or is_low_bit(formats)
    reason = why_not() if target_of("cuda").is_hopper and is_asked else None
    if reason is not None:
        return f"products with packed weights have to be compiled, and {reason}"
    return offered_on(checkpoint, formats, card)


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


@dataclass(slots=True, eq=False)
class Stream:
    """The residual stream of some rows, and room for its norm."""

    residual: torch.Tensor  # [num_rows, hidden]
    room: torch.Tensor  # [num_rows, hidden]
    normed_by: torch.Tensor | None = None
    """Whose norm of the residual, as it is now, lies there; None: nobody's."""


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


class Products:
    def __init__(self, spec: ModelSpec, scratch: ProductScratch, choices: Choices) -> None:
        self._eps, self._activation, self._alone = spec.norm_eps, activation_in(spec), alone_in(spec)
        self._scratch, self._choices = scratch, choices

    def fuses(self, matrix: Matrix, num_rows: int) -> bool:
        """Whether the product norms its rows itself."""
        return self._choice(matrix, num_rows).kernel.fuses

    def normed(self, stream: Stream, norm: torch.Tensor | None) -> torch.Tensor:
        """None: blocks that read the stream as it is."""
        if norm is None:
            return stream.residual
        if stream.normed_by is not norm:
            rms_norm(stream.residual, norm, stream.room, eps=self._eps)
            stream.normed_by = norm
        return stream.room

    def multiply(self, stream: Stream, norm: torch.Tensor | None, matrix: Matrix, out: torch.Tensor) -> None:
        """out [num_rows, outputs] = norm(stream) @ matrix.T, plus its bias, gated or activated, as the matrix has it;
        without a norm the stream itself."""
        choice = self._choice(matrix, len(out))
        kind = self._activation if matrix.product.is_gated else None
        if isinstance(choice.tile, GemvConfig):
            residual, config, bias = stream.residual, choice.tile, matrix.bias
            linear_few(
                residual, matrix.weight, out, norm_weight=norm, eps=self._eps, bias=bias, gated=kind, config=config
            )
        else:
            self._launch(choice, self.normed(stream, norm), matrix, out, kind)
        if matrix.product.role == "activated" and self._alone is not None:
            activate_rows(out, kind=self._alone)

    def apply(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        """out [num_rows, outputs] = x @ matrix.T, plus its bias: of rows that are as they should be."""
        choice = self._choice(matrix, len(out))
        if isinstance(choice.tile, GemvConfig):
            linear_few(x, matrix.weight, out, bias=matrix.bias, config=choice.tile)
        else:
            self._launch(choice, x, matrix, out, None)

    def join(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        stream: Stream,
        post_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        ranks: CardRanks | None = None,
    ) -> None:
        """What a block found joins the residual stream; where that takes a kernel of its own, it norms the stream for
        the next block, if there is one. `scale`: of a layer that ends here, and norms what it found. `ranks`: who find
        a part of it each."""
        assert scale is None or post_norm is not None
        if ranks is not None:
            ranks.add_up(found := self.whole(x, matrix))
            self.add(found, stream, post_norm, next_norm, scale)
            return
        choice, residual = self._choice(matrix, len(x)), stream.residual
        stream.normed_by = None
        if isinstance(choice.tile, GemvConfig):
            config, bias = choice.tile, matrix.bias
            linear_few(x, matrix.weight, residual, bias=bias, residual=residual, config=config)
            return
        if choice.kernel is CUBLAS and post_norm is None:
            residual.addmm_(x, matrix.weight.t())
            if matrix.bias is not None:
                residual.add_(matrix.bias)
            if next_norm is not None:
                self.normed(stream, next_norm)
            return
        self.add(self._multiplied(choice, x, matrix, self.found(len(x))), stream, post_norm, next_norm, scale)

    def _multiplied(self, choice: KernelChoice, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> torch.Tensor:
        """In `out` [num_rows, hidden], or in parts that its reader adds up  # float32 [parts, num_rows, hidden]"""
        if parts := choice.tile.sums:
            out = self._scratch.sums[: parts * out.numel()].view(parts, *out.shape)
        self._launch(choice, x, matrix, out, None)
        return out

    def whole(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor | None = None) -> torch.Tensor:
        """What a block found, by itself, in `out`; None: where `found` has room  # [num_rows, hidden]"""
        choice, out = self._choice(matrix, len(x)), self.found(len(x)) if out is None else out
        if isinstance(choice.tile, GemvConfig):
            linear_few(x, matrix.weight, out, bias=matrix.bias, config=choice.tile)
            return out
        found = self._multiplied(choice, x, matrix, out)
        if found.dim() == 3:
            for part in found[1:]:
                found[0].add_(part)
            out.copy_(found[0])
        return out

    def add(
        self,
        found: torch.Tensor,  # [num_rows, hidden], or [parts, num_rows, hidden]
        stream: Stream,
        post_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """The same, of what was multiplied before."""
        out = None if next_norm is None else stream.room
        add_rms_norm(found, stream.residual, next_norm, out, eps=self._eps, post_weight=post_norm, scale=scale)
        stream.normed_by = next_norm

    def end(self, stream: Stream, norm: AfterNorm | None) -> None:
        """Of an encoder's block, which has joined the stream: that is normed itself."""
        if norm is not None:
            layer_norm(stream.residual, norm.weight, norm.bias, eps=self._eps)

    def found(self, num_rows: int) -> torch.Tensor:
        """Room for what a block found, until another joins the stream  # [num_rows, hidden]"""
        return self._scratch.found[:num_rows]

    def long_rows(self, matrix: Matrix) -> list[int]:
        """Numbers of rows that, together, meet every kernel of more rows than start-up's steps have."""
        lines = self._choices.later_lines(matrix.product, matrix.form_names, LONG_ROWS)
        return [rows for rows, _ in lines]

    def _choice(self, matrix: Matrix, num_rows: int) -> KernelChoice:
        return self._choices.of(matrix.product, num_rows, matrix.form_names)

    def _launch(
        self, choice: KernelChoice, x: torch.Tensor, matrix: Matrix, out: torch.Tensor, gated: Activation | None
    ) -> None:
        num_sms = self._choices.card.num_sms
        LAUNCHES[choice.kernel.name](Call(x, matrix, out, choice.tile, self._scratch, num_sms, gated))


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
