"""A model's own MTP block on the device: its layer reads along with the model, token by token, and chains guesses from
there, all in the graphs of the steps themselves. `backends/host/mtp.py` has the same in numpy. Knows no policy: how
many drafts are made, it is told."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import prod

import torch

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.buffers import Buffers, tensor_bytes
from twostroke.backends.cuda.draft_blocks import HeadBlocks
from twostroke.backends.cuda.draft_clock import DraftClock
from twostroke.backends.cuda.draft_model import CompanionRows
from twostroke.backends.cuda.draft_names import DraftNames
from twostroke.backends.cuda.drafting import MAX_DRAFTS
from twostroke.backends.cuda.kernels.head_states import KEPT, InputNorms, StateStore
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.paged import AttentionShape
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.latent import LatentKernels
from twostroke.backends.cuda.layer_matrices import ModelMatrix, layer_matrices
from twostroke.backends.cuda.layer_weights import layer_weights
from twostroke.backends.cuda.matrix import Matrix, Plain, pack
from twostroke.backends.cuda.model import Decoder
from twostroke.backends.cuda.model_matrices import has_copy
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.passes import Decodes, Pass, TokenArrays
from twostroke.backends.cuda.products import Products
from twostroke.backends.cuda.state_chain import StateChain
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.cuda.weights import WeightLoader, Weights
from twostroke.backends.host.paged_layer import FIRST_SLOT
from twostroke.backends.interface import Companion, HeadNeeds
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.mtp import MtpHead, MtpSpec
from twostroke.models.spec import GroupedAttention, LatentAttention, ModelSpec, layer_name

ANY_WINDOW = 1 << 30
"""Longer than any context: decodes with a window begin where they are told to."""
_VALUE_BYTES = 2


def block_spec(spec: MtpSpec) -> ModelSpec:
    """As a model of one layer."""
    layer = spec.layer
    if isinstance(layer.attention, GroupedAttention) and layer.attention.window is None:
        layer = replace(layer, attention=replace(layer.attention, window=ANY_WINDOW))
    return ModelSpec("mtp", spec.draft_vocab_size, spec.hidden_size, spec.max_context, (layer,), spec.norm_eps)


def block_matrices(spec: MtpSpec) -> list[ModelMatrix]:
    joined = Product("plain", spec.hidden_size, 2 * spec.hidden_size)
    return [ModelMatrix("fc", "fc", joined, ("fc",)), *layer_matrices(block_spec(spec), 0)]


class BlockBuffers:
    """Beside the model's own, which are free whenever the block computes: its layer is like one of the model's."""

    def __init__(self, spec: MtpSpec, num_tokens: int, num_rows: int, device: torch.device, dtype: torch.dtype) -> None:
        def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        hidden = spec.hidden_size
        self.joined, self.residual = empty(num_tokens, hidden), empty(num_tokens, hidden)
        self.inputs = empty(num_tokens, 2 * hidden)
        self.state = empty(num_rows, hidden)
        self.kept = empty(num_rows + 1, KEPT, hidden)
        self.rows, self.positions = (empty(MAX_DRAFTS, num_rows, kind=torch.int32) for _ in range(2))


class MtpDrafter:
    """A `DeviceDrafter`. Slot p of what the block keeps is made from token p and the model's hidden state at p - 1,
    behind its last norm. Every row is read along, whether it is drafted for or not: slots are never missing, of
    prefixes neither."""

    name = "mtp"
    most = MAX_DRAFTS
    kernels = ()

    def __init__(
        self,
        companion: Companion,
        parts: Parts,
        layout: KVLayout,
        *,
        norm_eps: float,
        max_context: int,
        choices: Choices,
        has_copies: bool,
    ) -> None:
        """`norm_eps`: the model's; `has_copies`: whether its matrices have copies for decode where choices say so."""
        head, like, target = companion.head, parts.buffers.residual, parts.decoder.weights
        assert isinstance(head, MtpHead) and target.final_norm is not None
        spec, device, dtype = block_spec(head.spec), like.device, like.dtype
        self.source, self.taps, self.max_context = head.source, (len(target.layers) - 1,), max_context
        self._eps, self._block_eps = norm_eps, spec.norm_eps
        self._rows, self._target_norm = parts.rows, target.final_norm
        self._loader = WeightLoader(_in_layer(companion.checkpoint, head, spec), device, dtype)
        self._place_weights(head.spec, spec, target, choices if has_copies and dtype == torch.bfloat16 else None)
        num_rows = parts.rows.padding_row
        self._buffers = own = BlockBuffers(head.spec, len(like), num_rows, device, dtype)
        shared: Buffers = copy(parts.buffers)
        shared.residual = own.residual
        self._products = Products(spec, shared.products, choices)
        rows = CompanionRows.of(parts.rows, layout, companion.number, has_all_tokens=True)
        kv = KVStore(spec, layout.of_model(companion.number), device, dtype)
        self._decoder = Decoder(
            spec,
            self._weights,
            kv,
            (_kernels_of(spec, layout.block_size, dtype, device, num_rows),),
            shared,
            rows,
            max_context,
            choices,
            first=FIRST_SLOT,
        )
        num_blocks = layout.groups[layout.places_of(companion.number)[0]].num_blocks + 1  # the last takes padding's
        page_ends = like.new_zeros(num_blocks, spec.hidden_size)
        self.blocks = HeadBlocks((*kv.parts[0], page_ends))
        self._chain = StateChain(
            InputNorms(target.embedding, self._place("embedding_norm"), self._place("hidden_norm")),
            StateStore(own.kept, page_ends, rows.tables[0]),
            parts.rows,
            page=layout.block_size,
            eps=spec.norm_eps,
        )
        self._nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self._names = DraftNames(parts.rows, torch.arange(spec.vocab_size, dtype=torch.int32, device=device))
        self._clock = DraftClock(parts.graphs)

    def _place(self, name: str) -> torch.Tensor:
        return self._loader.place((name,))

    def _place_weights(self, head: MtpSpec, spec: ModelSpec, target: Weights, copies: Choices | None) -> None:
        joined, *_ = block_matrices(head)
        self._fc = Matrix("the block's fc", joined.product, {"plain": Plain(self._place("fc"))})
        layer = layer_weights(self._loader, spec, 0)
        self._norm = self._place("final_norm")
        self._weights = Weights(target.embedding, (layer,), self._norm, target.head)
        self._own = (self._fc, *layer.matrices)
        if copies is not None:
            names = {matrix.product for matrix in block_matrices(head) if has_copy(matrix, copies)}
            for matrix in self._own:
                if matrix.product in names:
                    matrix.make_room_for_packed()

    def load(self) -> tuple[str, ...]:
        self._loader.fill(None)
        return pack(self._own)

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return num_drafts * self._clock.a_draft_s(num_streams)

    def prepare(self, *, rehearses: bool) -> None:
        buffers = self._buffers
        self._decoder.prepare()
        for count in self._products.long_rows(self._fc):
            if count <= len(buffers.inputs):
                self._products.apply(buffers.inputs[:count], self._fc, buffers.residual[:count])
        if not rehearses:
            self._clock.time_all(self.draft, self._rows.padding_row, self._nothing.device)

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        """Fill the slots of all tokens of a pass. Those of drafts that will not hold are filled, too; what comes in
        their place is written over them."""
        tokens, count, buffers = done.tokens, len(done.tokens), self._buffers
        joined, inputs = buffers.joined[:count], buffers.inputs[:count]
        rms_norm(taps, self._target_norm, joined, eps=self._eps)
        self._chain.read(tokens, joined, inputs)
        self._products.apply(inputs, self._fc, buffers.residual[:count])
        self._decoder.go_through(Pass(tokens, Decodes(0)), wanted=self._nothing)
        self._chain.keep(tokens, joined)

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """The likeliest token after another, each beside the block's own state of the one before it."""
        buffers, count = self._buffers, len(rows) // width
        inputs, residual, state = buffers.inputs[:count], buffers.residual[:count], buffers.state[:count]
        for step in range(width - 1):
            own_rows, positions = buffers.rows[step, :count], buffers.positions[step, :count]
            if step == 0:
                self._chain.begin(rows, buffers.rows, buffers.positions, inputs, residual, steps=width - 1)
            else:
                self._chain.go_on(drafts, own_rows, state, inputs, residual, step=step)
            self._products.apply(inputs, self._fc, residual)
            found = self._decoder.go_through(Pass(TokenArrays(own_rows, own_rows, positions), Decodes(count)))
            logits = self._decoder.logits(found)
            rms_norm(found, self._norm, state, eps=self._block_eps)
            self._names.name(logits, own_rows, drafts, step)


def _in_layer(checkpoint: Checkpoint, head: MtpHead, spec: ModelSpec) -> Checkpoint:
    """With the layer's tensors named as a model's are."""
    shapes = spec.tensor_shapes()
    named = ((layer_name(0, name), name, own) for name, own in head.tensors.items())
    return replace(checkpoint, spec=spec, tensors={full if full in shapes else name: own for full, name, own in named})


def _kernels_of(
    spec: ModelSpec, page: int, dtype: torch.dtype, device: torch.device, num_rows: int
) -> Attention | LatentKernels:
    own = spec.layers[0].attention
    if isinstance(own, LatentAttention):
        return LatentKernels(own, page, dtype, device, num_rows)
    heads = spec.layers[0].grouped
    return Attention(AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, page, dtype), device, num_rows)


def mtp_needs(head: MtpHead, formats: Formats, sizes: StepSizes, copies: Choices | None) -> HeadNeeds:
    """In 16 bits, as the model is. `sizes`: of steps, at most; `copies`: by which decode has some, if it has."""
    spec, attention = head.spec, head.spec.layer.attention
    assert isinstance(attention, GroupedAttention | LatentAttention)
    nowhere = torch.device("meta")
    buffers = BlockBuffers(spec, sizes.max_tokens_per_step, sizes.max_running, nowhere, torch.bfloat16)
    held = sum(prod(tensor.shape) for tensor in head.tensors.values())
    taps = sizes.max_tokens_per_step * spec.hidden_size
    num_bytes = _VALUE_BYTES * (held + taps) + tensor_bytes(buffers)
    if copies is not None:
        num_bytes += sum(matrix.packed_bytes for matrix in block_matrices(spec) if has_copy(matrix, copies))
    block_end_bytes = -(-_VALUE_BYTES * spec.hidden_size // sizes.block_size)
    kv_bytes = _VALUE_BYTES * attention.kv_values + block_end_bytes
    return HeadNeeds(replace(formats, copies=None, reasons=()), num_bytes, kv_bytes)
