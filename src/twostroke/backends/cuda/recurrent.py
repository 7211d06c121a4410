"""Layers that keep a state in place of keys and values: what is launched between their first product and their last, in
each phase, and what drafts that held leave behind. Owns the scratch that its kernels share. Nothing here waits for the
device or allocates once it is made, so every call may be captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda.kernels.convolution import convolve_gated_step, convolve_tiles, keep_inputs
from twostroke.backends.cuda.kernels.state_items import (
    COPIES_AT_ONCE,
    ITEM_WORDS,
    Lengths,
    StateWork,
    decode_items,
    segment_items,
    settled_items,
)
from twostroke.backends.cuda.state_shape import StateShape, first_width
from twostroke.models.spec import ModelSpec, Recurrent, ShortConvolution

if TYPE_CHECKING:
    from twostroke.backends.cuda.kv_store import KVStore
    from twostroke.backends.cuda.weights import LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """What a layer has beside its first and last matrix, in float32; what its kind lacks is None."""

    conv: torch.Tensor  # [conv width, taps]


class RecurrentBuffers:
    """Between the kernels of one layer; layers run one after another and share it."""

    def __init__(
        self,
        mixer: Recurrent,
        num_layers: int,
        num_tokens: int,
        num_queries: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_queries`: of a step that verifies drafts, at most. What its tokens were projected to is held until it is
        known how many of them stay."""
        self.decodes, self.segments, self.settled = (
            torch.zeros(num_tokens + COPIES_AT_ONCE, ITEM_WORDS, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.drafted = torch.zeros(num_layers, num_queries, first_width(mixer), dtype=dtype, device=device)


class RecurrentPath:
    """What every such layer does between its first product and its last."""

    def __init__(self, spec: ModelSpec, kv: KVStore, buffers: RecurrentBuffers, lengths: Lengths) -> None:
        assert kv.states is not None
        layers = [index for index, layer in enumerate(spec.layers) if isinstance(layer.attention, Recurrent)]
        mixer = spec.layers[layers[0]].attention
        assert isinstance(mixer, Recurrent)
        self._mixer, self._shape, self._eps = mixer, StateShape.of(mixer), spec.norm_eps
        self._states = {layer: kv.parts[layer][0] for layer in layers}  # float32 [slots, values] each
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._buffers, self._lengths = buffers, lengths
        self._decodes = self._segments = buffers.decodes[:0]
        self._work: StateWork | None = None

    def begin(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        count: torch.Tensor | None,
        work: StateWork | None,
        *,
        width: int,
    ) -> None:
        """Before the first layer: rows and positions of the tokens that may be decodes, `width` of each stream;
        `count`: how many streams are."""
        buffers, lengths, self._work = self._buffers, self._lengths, work
        if len(rows):
            self._decodes = decode_items(rows, positions, lengths, buffers.decodes, count, width=width)
        if work is not None:
            self._segments = segment_items(work.segments, lengths, buffers.segments)

    def drafted(self, index: int, num_queries: int) -> torch.Tensor:
        """Where tokens of a step that verifies drafts are projected to  # [num_queries, first width]"""
        return self._buffers.drafted[self._place[index], :num_queries]

    def decode(
        self, index: int, layer: LayerWeights, projected: torch.Tensor, out: torch.Tensor, *, is_drafted: bool
    ) -> None:
        """Of the streams. Drafts change no state yet: `settle` does, when it is known which of them hold."""
        assert layer.recurrent is not None and isinstance(self._mixer, ShortConvolution)
        states, weight = self._states[index], layer.recurrent.conv
        convolve_gated_step(projected, weight, states, self._decodes, out, self._shape, writes=not is_drafted)

    def prefill(self, index: int, layer: LayerWeights, projected: torch.Tensor, out: torch.Tensor) -> None:
        """Of all chunks."""
        work, states, shape, own = self._work, self._states[index], self._shape, layer.recurrent
        assert work is not None and own is not None and isinstance(self._mixer, ShortConvolution)
        convolve_tiles(projected, own.conv, None, states, self._segments, work.tiles, out, shape, gated=True)
        keep_inputs(projected, states, self._segments, shape, gated=True)

    def settle(
        self,
        layers: tuple[LayerWeights, ...],
        rows: torch.Tensor,
        counts: torch.Tensor,
        *,
        width: int,
        saves: torch.Tensor | None = None,
    ) -> None:
        """As many of each stream's tokens as came have changed its states; or of each save as many as it wants, to
        its slot, which comes before."""
        items = settled_items(rows, counts, self._lengths, self._buffers.settled, width=width, saves=saves)
        for index, states in self._states.items():
            projected = self.drafted(index, len(rows))
            self._replay(layers[index], projected, states, items)

    def _replay(self, layer: LayerWeights, projected: torch.Tensor, states: torch.Tensor, items: torch.Tensor) -> None:
        keep_inputs(projected, states, items, self._shape, gated=isinstance(self._mixer, ShortConvolution))
