"""The kinds of layers that keep a state, each by its kernels: what decodes launch, what prompt chunks, and what drafts
that held. Each owns the scratch between its kernels. Nothing here allocates once it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from twostroke.backends.cuda.kernels.convolution import convolve_gated_step, convolve_tiles, keep_inputs
from twostroke.backends.cuda.kernels.delta_decode import DeltaVectors, delta_step
from twostroke.backends.cuda.kernels.delta_prefill import delta_tiles
from twostroke.backends.cuda.kernels.gated_norm import gated_norm
from twostroke.backends.cuda.kernels.mamba_decode import MambaVectors, scan_step
from twostroke.backends.cuda.kernels.mamba_prefill import scan_tiles
from twostroke.backends.cuda.kernels.state_items import TILE
from twostroke.backends.cuda.kernels.state_math import DeltaShape, MambaShape
from twostroke.backends.cuda.state_shape import StateShape
from twostroke.models.spec import GatedDeltaNet, Mamba2, Recurrent, ShortConvolution


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """What a layer has beside its first and last matrix, in float32; what its kind lacks is None."""

    conv: torch.Tensor  # [conv width, taps]
    conv_bias: torch.Tensor | None = None  # [conv width]
    dt_bias: torch.Tensor | None = None  # [heads]
    decay: torch.Tensor | None = None  # [heads], below 0
    skip: torch.Tensor | None = None  # [heads]
    gated_norm: torch.Tensor | None = None  # [value dim], or of all heads


class Chunks(NamedTuple):
    """A step's prompts."""

    items: torch.Tensor
    tiles: torch.Tensor
    first: int
    """No token before it is a prompt's."""
    num_decodes: torch.Tensor | None
    """int32 [1], where only the device knows: this many tokens, the first, are none."""


class Rule(Protocol):
    def decode(
        self,
        own: RecurrentWeights,
        x: torch.Tensor,
        states: torch.Tensor,
        items: torch.Tensor,
        out: torch.Tensor,
        *,
        writes: bool,
    ) -> None:
        """x: what tokens were projected to [num_tokens, first width]; states float32 [slots, values]; out [num_tokens,
        what the last product reads]. `writes`: the state behind an item's one token replaces that before it; else
        nothing is changed. What `out` has of tokens that are no decodes is of no use."""

    def prefill(
        self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, chunks: Chunks, out: torch.Tensor
    ) -> None:
        """Of prompt chunks; states are those behind them."""

    def replay(self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, items: torch.Tensor) -> None:
        """The states behind the items' tokens go to their targets; nothing is answered."""


class ConvolutionRule:
    def __init__(self, mixer: ShortConvolution) -> None:
        self._state = StateShape.of(mixer)

    def decode(
        self,
        own: RecurrentWeights,
        x: torch.Tensor,
        states: torch.Tensor,
        items: torch.Tensor,
        out: torch.Tensor,
        *,
        writes: bool,
    ) -> None:
        convolve_gated_step(x, own.conv, states, items, out, self._state, writes=writes)

    def prefill(
        self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, chunks: Chunks, out: torch.Tensor
    ) -> None:
        convolve_tiles(x, own.conv, None, states, chunks.items, chunks.tiles, out, self._state, gated=True)
        keep_inputs(x, states, chunks.items, self._state, gated=True)

    def replay(self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, items: torch.Tensor) -> None:
        keep_inputs(x, states, items, self._state, gated=True)


class DeltaRule:
    def __init__(
        self, mixer: GatedDeltaNet, num_tokens: int, dtype: torch.dtype, device: torch.device, eps: float
    ) -> None:
        self._state, self._eps = StateShape.of(mixer), eps
        heads = (mixer.num_key_heads, mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
        self._shape = DeltaShape(*heads, tiled=mixer.tiled)

        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros((num_tokens, *shape), dtype=dtype, device=device)

        self.mixed, self.found = empty(mixer.conv_width), empty(mixer.value_width)
        self.solved, self.scores = (empty(mixer.num_value_heads, TILE) for _ in range(2))

    def decode(
        self,
        own: RecurrentWeights,
        x: torch.Tensor,
        states: torch.Tensor,
        items: torch.Tensor,
        out: torch.Tensor,
        *,
        writes: bool,
    ) -> None:
        delta_step(x, _vectors(own), states, items, out, self._shape, self._state, eps=self._eps, writes=writes)

    def prefill(
        self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, chunks: Chunks, out: torch.Tensor
    ) -> None:
        number, shape, vectors = len(x), self._shape, _vectors(own)
        items, tiles, mixed, found = chunks.items, chunks.tiles, self.mixed[:number], self.found[:number]
        convolve_tiles(x, own.conv, None, states, items, tiles, mixed, self._state, gated=False)
        keep_inputs(x, states, items, self._state, gated=False)
        scratch = self.solved[:number], self.scores[:number]
        delta_tiles(x, mixed, vectors, states, items, tiles, *scratch, found, shape, self._state)
        gates = x[:, shape.gates_at : shape.betas_at]
        gated_norm(
            found, gates, vectors.norm, out, parts=shape.value_heads, eps=self._eps, gate_first=False,
            first=chunks.first, count=chunks.num_decodes,
        )  # fmt: skip

    def replay(self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, items: torch.Tensor) -> None:
        delta_step(x, _vectors(own), states, items, None, self._shape, self._state, eps=self._eps, writes=True)
        keep_inputs(x, states, items, self._state, gated=False)


class MambaRule:
    def __init__(self, mixer: Mamba2, num_tokens: int, dtype: torch.dtype, device: torch.device, eps: float) -> None:
        self._state, self._parts = StateShape.of(mixer), mixer.norm_groups
        self._eps = eps if mixer.norm_eps is None else mixer.norm_eps
        sizes = (mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.num_groups)
        self._shape = MambaShape(*sizes, mixer.shortest_step, mixer.longest_step)
        self.mixed = torch.zeros(num_tokens, mixer.conv_width, dtype=dtype, device=device)
        self.found = torch.zeros(num_tokens, mixer.width, dtype=dtype, device=device)

    def decode(
        self,
        own: RecurrentWeights,
        x: torch.Tensor,
        states: torch.Tensor,
        items: torch.Tensor,
        out: torch.Tensor,
        *,
        writes: bool,
    ) -> None:
        found = self.found[: len(x)]
        scan_step(x, _mamba_vectors(own), states, items, found, self._shape, self._state, writes=writes)
        self._norm(own, x, found, out)

    def prefill(
        self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, chunks: Chunks, out: torch.Tensor
    ) -> None:
        items, mixed, found = chunks.items, self.mixed[: len(x)], self.found[: len(x)]
        convolve_tiles(x, own.conv, own.conv_bias, states, items, chunks.tiles, mixed, self._state, gated=False)
        keep_inputs(x, states, items, self._state, gated=False)
        scan_tiles(x, mixed, _mamba_vectors(own), states, items, found, self._shape, self._state)
        self._norm(own, x, found, out, first=chunks.first, num_decodes=chunks.num_decodes)

    def replay(self, own: RecurrentWeights, x: torch.Tensor, states: torch.Tensor, items: torch.Tensor) -> None:
        scan_step(x, _mamba_vectors(own), states, items, None, self._shape, self._state, writes=True)
        keep_inputs(x, states, items, self._state, gated=False)

    def _norm(
        self,
        own: RecurrentWeights,
        x: torch.Tensor,
        found: torch.Tensor,
        out: torch.Tensor,
        *,
        first: int = 0,
        num_decodes: torch.Tensor | None = None,
    ) -> None:
        assert own.gated_norm is not None
        gates = x[:, self._shape.gates_at : self._shape.lengths_at]
        gated_norm(
            found, gates, own.gated_norm, out, parts=self._parts, eps=self._eps, gate_first=True, first=first,
            count=num_decodes,
        )  # fmt: skip


def _mamba_vectors(own: RecurrentWeights) -> MambaVectors:
    assert own.dt_bias is not None and own.decay is not None and own.skip is not None
    return MambaVectors(own.conv, own.conv_bias, own.dt_bias, own.decay, own.skip)


def _vectors(own: RecurrentWeights) -> DeltaVectors:
    assert own.dt_bias is not None and own.decay is not None and own.gated_norm is not None
    return DeltaVectors(own.conv, own.dt_bias, own.decay, own.gated_norm)


def rule_of(mixer: Recurrent, num_tokens: int, dtype: torch.dtype, device: torch.device, eps: float) -> Rule:
    """`num_tokens`: of a step, at most; `eps`: of the model's norms."""
    if isinstance(mixer, GatedDeltaNet):
        return DeltaRule(mixer, num_tokens, dtype, device, eps)
    if isinstance(mixer, Mamba2):
        return MambaRule(mixer, num_tokens, dtype, device, eps)
    return ConvolutionRule(mixer)
