"""Multiplies a layer's matrices with the rows of a step, and does what lies between products: gates, norms, the
residual stream. A table says which kernel multiplies, and `product_launches.py` how it is launched. Knows which kernels
norm their rows themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda.kernels.activation import Activation, activate_rows
from twostroke.backends.cuda.kernels.gemv import linear_few
from twostroke.backends.cuda.kernels.gemv_config import GemvConfig
from twostroke.backends.cuda.kernels.norms import add_rms_norm, layer_norm, rms_norm
from twostroke.backends.cuda.kernels.product import Card
from twostroke.backends.cuda.kernels.product_kernels import CUBLAS
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.layer_matrices import activation_in, alone_in
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.model_matrices import offered_on
from twostroke.backends.cuda.native import why_not
from twostroke.backends.cuda.product_launches import LAUNCHES, Call, ProductScratch
from twostroke.backends.cuda.stored_codes import is_low_bit
from twostroke.backends.cuda.tuned_table import Choices, KernelChoice
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import ModelSpec

if TYPE_CHECKING:
    from twostroke.backends.cuda.layer_weights import AfterNorm
    from twostroke.backends.cuda.ranks import CardRanks

LONG_ROWS = 256
"""Steps of fewer rows are all launched at start-up. There are too many longer lengths for that."""


def card_of(device: torch.device, dtype: torch.dtype) -> Card:
    target = target_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    is_able = target.is_hopper and dtype in (torch.bfloat16, torch.float16) and why_not() is None
    return Card(name, target.num_sms, is_able, target.has_float8, lacks_group_scales=target.lacks_group_scales)


def card_for(device: torch.device, dtype: torch.dtype, formats: Formats) -> Card:
    """Returns the card as an engine's formats let it be used: its float8 serves only if rows may be rounded."""
    card = card_of(device, dtype)
    has_float8 = card.has_float8 and formats.inputs_in_float8 is not False
    return replace(card, has_float8=has_float8, prefers_float8=formats.arithmetic == "fp8")


def decode_weights(checkpoint: Checkpoint, formats: Formats) -> DecodeWeights | str:
    """Returns what copies for decode take on the current device and spare its steps, or why there can be none."""
    card = card_of(torch.device("cuda"), torch.bfloat16)
    is_asked = formats.weights == "bf16" or is_low_bit(formats)
    reason = why_not() if target_of("cuda").is_hopper and is_asked else None
    if reason is not None:
        return f"products with packed weights have to be compiled, and {reason}"
    return offered_on(checkpoint, formats, card)


@dataclass(slots=True, eq=False)
class Stream:
    """The residual stream of some rows, and room for its norm."""

    residual: torch.Tensor  # [num_rows, hidden]
    room: torch.Tensor  # [num_rows, hidden]
    normed_by: torch.Tensor | None = None
    """The norm whose result for the present residual lies in `room`. None means that nothing does."""


class Products:
    def __init__(self, spec: ModelSpec, scratch: ProductScratch, choices: Choices) -> None:
        self._eps, self._activation, self._alone = spec.norm_eps, activation_in(spec), alone_in(spec)
        self._scratch, self._choices = scratch, choices

    def fuses(self, matrix: Matrix, num_rows: int) -> bool:
        """Whether the product norms its rows itself."""
        return self._choice(matrix, num_rows).kernel.fuses

    def normed(self, stream: Stream, norm: torch.Tensor | None) -> torch.Tensor:
        """Returns the stream normed by `norm`. None is for blocks that read the stream as it is."""
        if norm is None:
            return stream.residual
        if stream.normed_by is not norm:
            rms_norm(stream.residual, norm, stream.room, eps=self._eps)
            stream.normed_by = norm
        return stream.room

    def multiply(self, stream: Stream, norm: torch.Tensor | None, matrix: Matrix, out: torch.Tensor) -> None:
        """Computes out [num_rows, outputs] = norm(stream) @ matrix.T, plus its bias, gated or activated, as the matrix
        has it. Without a norm it reads the stream itself."""
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
        """Computes out [num_rows, outputs] = x @ matrix.T, plus its bias, for rows that need no norm."""
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
        """Adds a block's result to the residual stream. If that takes a kernel of its own, it also norms the stream for
        the next block, if there is one. `scale` is that of a layer that ends here and norms its result. `ranks` each
        compute a part of the result."""
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
        """Returns the product in `out`, or parts that its reader adds up  # float32 [parts, num_rows, hidden]"""
        if parts := choice.tile.sums:
            out = self._scratch.sums[: parts * out.numel()].view(parts, *out.shape)
        self._launch(choice, x, matrix, out, None)
        return out

    def whole(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a block's result, not added to the stream, in `out`. None means the room that `found` returns  #
        [num_rows, hidden]"""
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
        """Adds a block's result to the residual stream, as `join` does, once the product is computed."""
        out = None if next_norm is None else stream.room
        add_rms_norm(found, stream.residual, next_norm, out, eps=self._eps, post_weight=post_norm, scale=scale)
        stream.normed_by = next_norm

    def end(self, stream: Stream, norm: AfterNorm | None) -> None:
        """Norms the stream itself after an encoder's block has joined it."""
        if norm is not None:
            layer_norm(stream.residual, norm.weight, norm.bias, eps=self._eps)

    def found(self, num_rows: int) -> torch.Tensor:
        """Returns room for a block's result, until another joins the stream  # [num_rows, hidden]"""
        return self._scratch.found[:num_rows]

    def long_rows(self, matrix: Matrix) -> list[int]:
        """Returns numbers of rows that together meet every kernel of more rows than start-up's steps have."""
        lines = self._choices.later_lines(matrix.product, matrix.form_names, LONG_ROWS)
        return [rows for rows, _ in lines]

    def _choice(self, matrix: Matrix, num_rows: int) -> KernelChoice:
        return self._choices.of(matrix.product, num_rows, matrix.form_names)

    def _launch(
        self, choice: KernelChoice, x: torch.Tensor, matrix: Matrix, out: torch.Tensor, gated: Activation | None
    ) -> None:
        num_sms = self._choices.card.num_sms
        LAUNCHES[choice.kernel.name](Call(x, matrix, out, choice.tile, self._scratch, num_sms, gated))
