"""Layers that keep a state in place of keys and values: which states a step works on, layer by layer, in each phase,
and what drafts that held leave behind. How a state changes is `recurrent_rules.py`'s to know. Nothing here waits for
the device or allocates once it is made, so every call may be captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda.kernels.state_items import (
    COPIES_AT_ONCE,
    ITEM_WORDS,
    Lengths,
    StateWork,
    decode_items,
    segment_items,
    settled_items,
)
from twostroke.backends.cuda.recurrent_rules import Chunks, rule_of
from twostroke.backends.cuda.state_shape import first_width
from twostroke.models.spec import ModelSpec, Recurrent

if TYPE_CHECKING:
    from twostroke.backends.cuda.kv_store import KVStore
    from twostroke.backends.cuda.layer_weights import LayerWeights, MixWeights


class RecurrentBuffers:
    """Layers run one after another and share it, but for what drafts leave."""

    def __init__(
        self,
        spec: ModelSpec,
        mixer: Recurrent,
        num_tokens: int,
        num_queries: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_queries`: of a step that verifies drafts, at most. What its tokens were projected to is held until it is
        known how many of them stay."""
        num_layers = sum(layer.attention == mixer for layer in spec.layers)
        self.rule = rule_of(mixer, num_tokens, dtype, device, spec.norm_eps)
        self.decodes, self.segments, self.settled = (
            torch.zeros(num_tokens + COPIES_AT_ONCE, ITEM_WORDS, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.drafted = torch.zeros(num_layers, num_queries, first_width(mixer), dtype=dtype, device=device)


class RecurrentPath:
    """What every such layer does between its first product and its last."""

    def __init__(self, spec: ModelSpec, kv: KVStore, buffers: RecurrentBuffers, lengths: Lengths) -> None:
        layers = [index for index, layer in enumerate(spec.layers) if isinstance(layer.attention, Recurrent)]
        self._states = {layer: kv.parts[layer][0] for layer in layers}  # float32 [slots, values] each
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._buffers, self._rule, self._lengths = buffers, buffers.rule, lengths
        self._decodes = buffers.decodes[:0]
        self._chunks: Chunks | None = None

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
        buffers, lengths = self._buffers, self._lengths
        if len(rows):
            self._decodes = decode_items(rows, positions, lengths, buffers.decodes, count, width=width)
        if work is not None:
            items = segment_items(work.segments, lengths, buffers.segments)
            self._chunks = Chunks(items, work.tiles, len(rows) if count is None else 0, count)

    def drafted(self, index: int, num_queries: int) -> torch.Tensor:
        """Where tokens of a step that verifies drafts are projected to  # [num_queries, first width]"""
        return self._buffers.drafted[self._place[index], :num_queries]

    def decode(
        self, index: int, layer: MixWeights, projected: torch.Tensor, out: torch.Tensor, *, is_drafted: bool
    ) -> None:
        """Of the streams. Drafts change no state yet: `settle` does, when it is known which of them hold."""
        assert layer.recurrent is not None
        states = self._states[index]
        self._rule.decode(layer.recurrent, projected, states, self._decodes, out, writes=not is_drafted)

    def prefill(self, index: int, layer: MixWeights, projected: torch.Tensor, out: torch.Tensor) -> None:
        """Of all chunks."""
        assert layer.recurrent is not None and self._chunks is not None
        self._rule.prefill(layer.recurrent, projected, self._states[index], self._chunks, out)

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
            mix = layers[index].mix
            assert mix is not None and mix.recurrent is not None
            self._rule.replay(mix.recurrent, self.drafted(index, len(rows)), states, items)
