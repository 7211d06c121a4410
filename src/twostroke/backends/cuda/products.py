"""A layer's matrices times the rows of a step, with what stands between them: gates, norms, the residual stream. Which
kernel multiplies is the table's to say; knows how each is launched, and which take the norm ahead along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.backends.cuda.kernels.activation import Activation, gated
from twostroke.backends.cuda.kernels.cluster_products import cluster_product
from twostroke.backends.cuda.kernels.gemv import linear_few
from twostroke.backends.cuda.kernels.gemv_config import GemvConfig
from twostroke.backends.cuda.kernels.norms import add_rms_norm, rms_norm
from twostroke.backends.cuda.kernels.packed_products import packed_product
from twostroke.backends.cuda.kernels.product import MAX_PART_ROWS, Card
from twostroke.backends.cuda.kernels.product_kernels import CUBLAS
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.model_matrices import offered_on
from twostroke.backends.cuda.native import why_not
from twostroke.backends.cuda.tuned_table import Choices, KernelChoice
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import ModelSpec

LONG_ROWS = 256
"""Steps of fewer rows are all launched at start; of the lengths beyond there are too many."""


def card_of(device: torch.device, dtype: torch.dtype) -> Card:
    target = target_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    is_able = target.is_hopper and dtype in (torch.bfloat16, torch.float16) and why_not() is None
    return Card(name, target.num_sms, is_able)


def decode_weights(checkpoint: Checkpoint, formats: Formats) -> DecodeWeights | str:
    """What copies for decode take on the current device and spare its steps; or why there can be none."""
    card = card_of(torch.device("cuda"), torch.bfloat16)
    reason = why_not() if target_of("cuda").is_hopper and formats.weights == "bf16" else None
    if reason is not None:
        return f"products with packed weights have to be compiled, and {reason}"
    return offered_on(checkpoint, formats, card)


class ProductScratch:
    """Room for what a product leaves for the kernel behind it; layers run one after another and share it."""

    def __init__(self, spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.found = torch.zeros(num_tokens, spec.hidden_size, dtype=dtype, device=device)
        self.gate_up = torch.zeros(num_tokens, 2 * spec.dense_width, dtype=dtype, device=device)
        self.sums = torch.zeros(MAX_PART_ROWS * spec.hidden_size, dtype=torch.float32, device=device)


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
        self._eps, self._activation = spec.norm_eps, spec.layers[0].mlp.activation
        self._scratch, self._choices = scratch, choices

    def fuses(self, matrix: Matrix, num_rows: int) -> bool:
        """Whether the product norms its rows itself."""
        return self._choice(matrix, num_rows).kernel.fuses

    def normed(self, stream: Stream, norm: torch.Tensor) -> torch.Tensor:
        if stream.normed_by is not norm:
            rms_norm(stream.residual, norm, stream.room, eps=self._eps)
            stream.normed_by = norm
        return stream.room

    def multiply(self, stream: Stream, norm: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        """out [num_rows, outputs] = norm(stream) @ matrix.T, plus its bias or gated, as the matrix has it."""
        choice = self._choice(matrix, len(out))
        kind = self._activation if matrix.product.is_gated else None
        if isinstance(choice.tile, GemvConfig):
            residual, config, bias = stream.residual, choice.tile, matrix.bias
            linear_few(
                residual, matrix.weight, out, norm_weight=norm, eps=self._eps, bias=bias, gated=kind, config=config
            )
        else:
            self._launch(choice, self.normed(stream, norm), matrix, out, kind)

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
    ) -> None:
        """What a block found joins the residual stream; where that takes a kernel of its own, it norms the stream for
        the next block, if there is one."""
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
        found = self._scratch.found[: len(x)]
        if parts := choice.tile.sums:
            found = self._scratch.sums[: parts * found.numel()].view(parts, *found.shape)
        self._launch(choice, x, matrix, found, None)
        out = None if next_norm is None else stream.room
        add_rms_norm(found, residual, next_norm, out, eps=self._eps, post_weight=post_norm)
        stream.normed_by = next_norm

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
    x, out, weight, bias = call.x, call.out, call.matrix.weight.t(), call.matrix.bias
    if call.gated is not None:
        gate_up = call.scratch.gate_up[: len(x)]
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


LAUNCHES: dict[str, Callable[[Call], None]] = {
    "cublas": _by_cublas,
    "cluster": _by_clusters,
    "packed": _from_packed,
}
"""By the kernels' names; those that fuse are called where they do."""
