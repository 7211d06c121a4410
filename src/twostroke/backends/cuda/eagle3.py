"""An EAGLE-3 head on the device: it reads along with the model, token by token, and chains guesses from there, all in
the graphs of the steps themselves. `backends/host/eagle3.py` has the same in numpy. Knows no policy: how many drafts
are made, it is told."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.attention import meet_plans
from twostroke.backends.cuda.draft_blocks import HeadBlocks
from twostroke.backends.cuda.draft_clock import DraftClock
from twostroke.backends.cuda.draft_names import DraftNames
from twostroke.backends.cuda.drafting import MAX_DRAFTS
from twostroke.backends.cuda.eagle3_weights import Eagle3Buffers, Eagle3Weights, layer_spec
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import cut_contexts, decode_config, split_plan
from twostroke.backends.cuda.kernels.head_states import KEPT, InputNorms, StateStore
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring
from twostroke.backends.cuda.kernels.rope import rope_and_store
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import pack
from twostroke.backends.cuda.mixers import rotation
from twostroke.backends.cuda.passes import Pass
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.state_chain import StateChain
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.cuda.weights import WeightLoader
from twostroke.backends.host.paged_layer import FIRST_SLOT
from twostroke.core.kv_layout import KVLayout
from twostroke.models.heads.eagle3 import Eagle3Head

ANY_WINDOW = 1 << 30
"""Longer than any context."""


class Eagle3Drafter:
    """A `DeviceDrafter`. Slot p of its keys and values is made from token p and the model's hidden states at p - 1.
    Every row is read along, whether it is drafted for or not: slots are never missing, of prefixes neither."""

    name = "eagle3"
    most = MAX_DRAFTS
    kernels = ()

    def __init__(
        self,
        head: Eagle3Head,
        weights: Eagle3Weights,
        loader: WeightLoader,
        buffers: Eagle3Buffers,
        rows: DeviceRows,
        layout: KVLayout,
        model: int,
        *,
        max_context: int,
        num_sms: int,
        choices: Choices,
        graphs: GraphCache,
    ) -> None:
        """`model`: whose groups of the layout are the head's."""
        spec = head.spec
        self.source, self.taps = head.source, tuple(tap - 1 for tap in spec.taps)
        self.max_context = max_context
        self._spec, self._weights, self._buffers, self._rows = spec, weights, buffers, rows
        self._loader, self._clock = loader, DraftClock(graphs)
        place = layout.places_of(model)[0]
        num_blocks, attention = layout.groups[place].num_blocks + 1, spec.layer.grouped  # the last takes padding's
        like = buffers.joined
        shape = (num_blocks, attention.num_kv_heads, layout.block_size, attention.head_dim)
        self._paged = PagedKV(like.new_zeros(shape), like.new_zeros(shape), rows.tables[place])
        kept = like.new_zeros(len(rows.last_tokens), KEPT, spec.hidden_size)
        page_ends = like.new_zeros(num_blocks, spec.hidden_size)
        self.blocks = HeadBlocks((self._paged.keys, self._paged.values, page_ends))
        self._chain = StateChain(
            InputNorms(weights.embedding, weights.embedding_norm, weights.hidden_norm),
            StateStore(kept, page_ends, rows.tables[place]),
            rows,
            page=layout.block_size,
            eps=spec.norm_eps,
            normed_residual=spec.norm_before_residual,
        )
        self._products = Products(layer_spec(spec, max_context), buffers.products, choices)
        self._cos_sin = rotation(attention.rope, max_context, like.device)
        self._is_windowed = attention.window is not None
        self._scoring = Scoring(attention.scale, attention.window or ANY_WINDOW, first=FIRST_SLOT)
        heads = AttentionShape(
            attention.num_heads, attention.num_kv_heads, attention.head_dim, layout.block_size, like.dtype
        )
        self._scratch = DecodeScratch(len(buffers.residual), heads, like.device, num_sms)
        self._items = self._scratch.new_items()
        self._names = DraftNames(rows, weights.target_ids)

    def load(self) -> tuple[str, ...]:
        self._loader.fill(None)
        return pack(self._weights.own)

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return num_drafts * self._clock.a_draft_s(num_streams)

    def prepare(self, *, rehearses: bool) -> None:
        buffers, weights = self._buffers, self._weights
        meet_plans(self._cut, len(buffers.residual), buffers.positions.device)
        for matrix, out in ((weights.fc, buffers.joined), (weights.kv, buffers.kv)):
            for count in (count for count in self._products.long_rows(matrix) if count <= len(out)):
                self._products.apply(out.new_zeros(count, matrix.product.width), matrix, out[:count])
        if not rehearses:
            self._clock.time_all(self.draft, self._rows.padding_row, buffers.joined.device)

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        """Fill the slots of all tokens of a pass. taps [num_tokens, taps * target hidden], overwritten. Those of drafts
        that will not hold are filled, too; what comes in their place is written over them."""
        weights, buffers, tokens, count = self._weights, self._buffers, done.tokens, len(done.tokens)
        joined, inputs, kv = buffers.joined[:count], buffers.inputs[:count], buffers.kv[:count]
        self._products.apply(self._normed_taps(taps), weights.fc, joined)
        self._chain.read(tokens, joined, inputs)
        self._products.apply(inputs, weights.kv, kv)
        norms, eps = (weights.q_norm, weights.k_norm), self._spec.norm_eps
        rope_and_store(kv, self._cos_sin, tokens.positions, tokens.rows, self._paged, *norms, eps=eps)
        self._chain.keep(tokens, joined)

    def _normed_taps(self, taps: torch.Tensor) -> torch.Tensor:
        weights, eps, width = self._weights, self._spec.norm_eps, self._spec.target_hidden_size
        if weights.input_norm is not None:
            rms_norm(taps, weights.input_norm, taps, eps=eps)
        for index, norm in enumerate(weights.fc_norms):
            own = taps[:, index * width : (index + 1) * width]
            rms_norm(own, norm, own, eps=eps)
        return taps

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """The likeliest token after another."""
        buffers, count = self._buffers, len(rows) // width
        inputs, residual, state = buffers.inputs[:count], buffers.residual[:count], buffers.residual[:count]
        for step in range(width - 1):
            own_rows, positions = buffers.rows[step, :count], buffers.positions[step, :count]
            if step == 0:
                self._chain.begin(rows, buffers.rows, buffers.positions, inputs, residual, steps=width - 1)
            else:
                self._chain.go_on(drafts, own_rows, state, inputs, residual, step=step)
            if step == 0 or self._is_windowed:  # contexts that only grow keep their cuts
                self._cut(positions)
            state = self._guess(inputs, residual, own_rows, positions)
            self._names.name(buffers.logits[:count], own_rows, drafts, step)

    def _cut(self, positions: torch.Tensor) -> None:
        """As `Attention.cut_decodes`."""
        number, head_dim = len(positions), self._spec.layer.grouped.head_dim
        if number > 1:
            card, window = target_of(positions.device).name, self._scoring.window
            kv_heads = self._spec.layer.grouped.num_kv_heads
            plan = split_plan(number, kv_heads, self._scratch.num_sms, card, window=window)
            config = decode_config(head_dim, number, positions.device, window=window)
            cut_contexts(positions, self._items, plan, config, window=window)

    def _guess(
        self, inputs: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """One step of the chain, up to its scores. Returns the state that stands for the model's at these positions."""
        weights, buffers, products, count = self._weights, self._buffers, self._products, len(rows)
        own, eps = self._spec.layer.grouped, self._spec.norm_eps
        qkv, mixed = buffers.qkv[:count], buffers.attention[:count]
        products.apply(inputs, weights.qkv, qkv)
        rope_and_store(qkv, self._cos_sin, positions, rows, self._paged, weights.q_norm, weights.k_norm, eps=eps)
        queries = qkv.view(count, -1, own.head_dim)[:, : own.num_heads]
        items = self._items if count > 1 else None
        attend_decode(queries, self._paged, rows, positions, mixed, self._scoring, self._scratch, items)
        stream = Stream(residual, buffers.normed[:count])
        products.join(mixed, weights.o, stream, None, weights.mlp_norm)
        products.multiply(stream, weights.mlp_norm, weights.gate_up, buffers.activated[:count])
        products.join(buffers.activated[:count], weights.down, stream, None, weights.final_norm)
        products.multiply(stream, weights.final_norm, weights.output, buffers.logits[:count])
        return products.normed(stream, weights.final_norm) if self._spec.norm_output else residual
