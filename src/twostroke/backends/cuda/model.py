"""The forward pass of a decoder on a device. Decode tokens come first and prefill chunks follow. Attention is called
once for each phase, on its own range. `products.py` knows which kernels multiply. Nothing here waits, allocates or
reads a number back, so that all can be captured in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from twostroke.backends.cuda.buffers import Buffers
from twostroke.backends.cuda.kernels.embedding import Places, Positions, gather, gather_places
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.state_items import Lengths
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.layer_inputs import InputPath
from twostroke.backends.cuda.layer_weights import LayerWeights, MixWeights
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.mixers import Kernels, mixers_of, windows_of
from twostroke.backends.cuda.mlp_path import MlpPath
from twostroke.backends.cuda.passes import Follow, Pass, TokenArrays
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.ranks import CardRanks
from twostroke.backends.cuda.recurrent import RecurrentPath
from twostroke.backends.cuda.rows import ModelRows
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.cuda.weights import Weights
from twostroke.models.spec import ModelSpec


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kv: KVStore,
        kernels: Kernels,
        buffers: Buffers,
        rows: ModelRows,
        max_context: int,
        choices: Choices,
        first: int = 0,
        ranks: CardRanks | None = None,
    ) -> None:
        """`first`: see `mixers_of`. `ranks` are all the ranks that hold a part of the model each."""
        self._spec, self.weights, self.ranks = spec, weights, ranks
        self._kernels = tuple(zip(kernels, windows_of(spec), strict=True))
        self._buffers, self._rows = buffers, rows
        if ranks is not None:
            ranks.make_room(len(buffers.logits))
        self._products = Products(spec, buffers.products, choices)
        self._mixers = mixers_of(spec, weights, kv, kernels, buffers, rows, max_context, self._products, first)
        self._inputs = None
        if weights.inputs is not None and buffers.inputs is not None:
            self._inputs = InputPath(spec, weights.inputs, buffers.inputs, self._products)
        self.recurrent = None
        """The path of layers that keep states. None means that there are none."""
        if kv.states is not None and buffers.recurrent is not None:
            lengths = Lengths(rows.sampling.records, rows.tables[kv.states[0]])
            self.recurrent = RecurrentPath(spec, kv, buffers.recurrent, lengths)
        shapes = spec.tensor_shapes()
        looked_up = ("embedding", "output", "layer_embedding")
        in_layers = sum(prod(size) for name, size in shapes.items() if name not in looked_up)
        if (moe := spec.moe) is not None:
            in_experts = sum(prod(size) for name, size in shapes.items() if ".experts." in name)
            in_layers -= in_experts * (moe.num_experts - moe.experts_per_token) // moe.num_experts
        self.multiply_adds_per_token = in_layers if ranks is None else ranks.largest(in_layers)
        kinds = {layer: index for index, layer in reversed(list(enumerate(spec.layers)))}
        self.distinct_layers = sorted({*kinds.values(), spec.num_layers - 1})  # the last layer has no norm behind it
        """One layer of each kind. A pass through these alone meets every kernel, and is of no other use."""
        self._mlps = MlpPath(spec, weights.layers, buffers, self._products, choices, ranks)
        self._follow: Follow | None = None
        self.before_layer: Callable[[int], None] | None = None
        """Called before each layer of a pass that no graph holds, since its KV may still be on its way."""
        self._taps: dict[int, torch.Tensor] = {}  # [max tokens, hidden] each, side by side
        self._side_by_side = buffers.residual

    def keep(self, layers: Sequence[int], follow: Follow) -> None:
        """Makes every pass from now on call `follow`, before any token is sampled, with the pass and with the residual
        stream behind these layers, side by side. -1 means what enters the first layer."""
        last, hidden = self._spec.num_layers - 1, self._spec.hidden_size
        if any(not -1 <= layer <= last for layer in layers):
            raise ValueError(f"Layers {tuple(layers)} cannot be tapped: the last is {last}.")
        self._follow = follow
        self._side_by_side = self._buffers.residual.new_zeros(len(self._buffers.residual), len(layers) * hidden)
        self._taps = dict(zip(layers, self._side_by_side.split(hidden, dim=1) if layers else (), strict=True))

    def kept(self, layer: int) -> torch.Tensor:
        """Returns the residual stream of the last pass behind a layer that is kept  # [max tokens, hidden]"""
        return self._taps[layer]

    def prepare(self) -> None:
        """Compiles kernels that the steps at start-up may not all meet: those of the decodes' cuts, of long products
        and of experts. Layers share them."""
        for kernels, windows in self._kernels:
            kernels.prepare(windows)
        for index in self.distinct_layers:
            self._prepare_layer(self.weights.layers[index])
        self._mlps.prepare()

    def _prepare_layer(self, layer: LayerWeights) -> None:
        buffers, products = self._buffers, self._products

        def each(matrix: Matrix) -> list[int]:
            return [rows for rows in products.long_rows(matrix) if rows <= len(buffers.residual)]

        if (mix := layer.mix) is not None:
            self._mixers.prepare(mix, len(buffers.residual))
            for rows in each(mix.qkv):
                out = buffers.qkv_of(rows, mix.qkv.product.outputs)
                products.multiply(self._stream(rows), layer.attention_norm, mix.qkv, out)
            for rows in each(mix.o):
                mixed = buffers.attention_of(rows, mix.o.product.width)
                products.join(mixed, mix.o, self._stream(rows), layer.post_mlp_norm, layer.mlp_norm)
        if layer.input is not None and self._inputs is not None:
            self._inputs.prepare(layer.input, len(buffers.residual))
        self._mlps.prepare_layer(layer, self._stream, each)

    def _stream(self, num_rows: int) -> Stream:
        return Stream(self._buffers.residual[:num_rows], self._buffers.normed[:num_rows])

    def forward(
        self, work: Pass, *, layers: Sequence[int] | None = None, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes every token and writes its keys and values, in these layers: all (None), or `distinct_layers` for a
        run that need only meet every kernel. Returns the residual stream # [num_tokens, hidden]. With `wanted` (int32
        indices) it is only that of these tokens: the last layer goes on with them alone, once all keys are written."""
        weights, tokens, stream = self.weights, work.tokens, self._stream(len(work.tokens))
        scale = self._spec.embedding_scale
        positions = None
        if work.decodes.slots:  # their rows know their positions
            positions = Positions(tokens.positions, self._rows.sampling.records, self._buffers.positions[: len(tokens)])
            tokens = TokenArrays(tokens.token_ids, tokens.rows, positions.found)
        ids = (tokens.token_ids, tokens.rows, self._rows.last_tokens)
        if weights.places is None:
            gather(weights.embedding, *ids, stream.residual, scale=scale, positions=positions)
        else:
            self._gather_places(weights.places, tokens, stream.residual)
        if self._inputs is not None:
            self._inputs.begin(stream.residual, ids)
        return self.go_through(replace(work, tokens=tokens), layers=layers, wanted=wanted)

    def go_through(
        self, work: Pass, *, layers: Sequence[int] | None = None, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes tokens that have entered the residual stream already, and whose positions are known."""
        tokens, decodes, prefill = work.tokens, work.decodes, work.prefill
        stream = self._stream(len(tokens))
        places, states = tokens.positions[: decodes.slots], None if prefill is None else prefill.states
        if decodes.slots:
            for kernels, windows in self._kernels:
                kernels.cut_decodes(places, windows, count=decodes.count, width=decodes.width)
        if self.recurrent is not None:
            own_rows = tokens.rows[: decodes.slots]
            self.recurrent.begin(own_rows, places, decodes.count, states, width=decodes.width)
        self._tap(-1, stream)
        residual = self._through_layers(work, stream, layers, wanted)
        if self._follow is not None:
            self._follow(work, self._side_by_side[: len(tokens)])
        return residual

    def _gather_places(self, places: Places, tokens: TokenArrays, out: torch.Tensor) -> None:
        """Fills the residual stream of an encoder, which decodes nothing."""
        own, ids = self._spec.places, (tokens.token_ids, tokens.rows, tokens.positions)
        assert own is not None
        first, eps = own.first_position, self._spec.norm_eps
        seconds = self._rows.second_texts
        gather_places(self.weights.embedding, places, *ids, seconds, out, first_place=first, eps=eps)

    def _through_layers(
        self, work: Pass, stream: Stream, layers: Sequence[int] | None, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        weights, last = self.weights, self._spec.num_layers - 1
        selected = None if last in self._taps else wanted  # a tap needs every token
        for index in range(self._spec.num_layers) if layers is None else layers:
            layer = weights.layers[index]
            if self.before_layer is not None:
                self.before_layer(index)
            own = selected if index == last else None
            is_all = own is not None and len(own) == 0
            mixed = None
            if layer.mix is not None:
                mixed = self._mix(index, layer, layer.mix, stream, work, leaves_keys=is_all)
            if is_all:
                return stream.residual[:0]  # a chunk inside a prompt: only its keys are wanted
            if own is not None:
                mixed, stream = self._select(mixed, stream.residual, own)
            self._finish(index, layer, mixed, stream, own)
            self._tap(index, stream)
        if selected is not None or wanted is None:
            return stream.residual
        return torch.index_select(stream.residual, 0, wanted, out=self._buffers.selected[: len(wanted)])

    def _tap(self, layer: int, stream: Stream) -> None:
        if layer in self._taps:
            self._taps[layer][: len(stream.residual)].copy_(stream.residual)

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """Returns the logits of rows of the residual stream  # float32 [rows, vocab]"""
        spec, weights, count = self._spec, self.weights, len(residual)
        logits, stream = self._buffers.logits[:count], Stream(residual, self._buffers.normed[:count])
        found = logits if self.ranks is None else self.ranks.own_logits(count)
        self._products.multiply(stream, weights.final_norm, weights.output, found)
        if self.ranks is not None:
            self.ranks.collect(logits)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def states(self, residual: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the last states of a model that gives no logits, normed if it norms them  # float32 [rows, hidden]"""
        if (norm := self.weights.final_norm) is None:
            out.copy_(residual)
        else:
            rms_norm(residual, norm, out, eps=self._spec.norm_eps)

    def _select(
        self, mixed: torch.Tensor | None, residual: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor | None, Stream]:
        count = len(wanted)
        if mixed is not None:
            chosen = self._buffers.selected_of(count, mixed.shape[1])
            mixed = torch.index_select(mixed, 0, wanted, out=chosen)
        chosen_residual = self._buffers.selected[:count]
        torch.index_select(residual, 0, wanted, out=chosen_residual)
        return mixed, Stream(chosen_residual, self._buffers.normed[:count])

    def _finish(
        self,
        index: int,
        layer: LayerWeights,
        mixed: torch.Tensor | None,
        stream: Stream,
        selected: torch.Tensor | None,
    ) -> None:
        """Computes the part of a layer after its attention. The stream may leave normed for the next layer. `selected`
        are the tokens that went on, if not all did."""
        layers = self.weights.layers
        behind = layers[index + 1] if index + 1 < len(layers) else None
        next_norm = None if behind is None else behind.first_norm
        if layer.mix is not None and mixed is not None:
            following = next_norm if layer.mlp is None else layer.mlp_norm
            norms = layer.post_attention_norm, following
            self._products.join(mixed, layer.mix.o, stream, *norms, ranks=self.ranks)
            self._products.end(stream, layer.after_attention)
        if layer.input is None or self._inputs is None:
            self._mlps.go_through(index, layer, stream, behind, layer.scale)
            return
        self._mlps.go_through(index, layer, stream, None, None)
        self._inputs.join(index, layer.input, stream, next_norm, layer.scale, selected)

    def _mix(
        self,
        index: int,
        layer: LayerWeights,
        mix: MixWeights,
        stream: Stream,
        work: Pass,
        *,
        leaves_keys: bool,
    ) -> torch.Tensor:
        """Computes what tokens read of each other, each phase by its own path  # [num_tokens, what `o` reads].
        `leaves_keys` means that only what is left for later tokens is wanted."""
        tokens, decodes, number, buffers = work.tokens, work.decodes, len(work.tokens), self._buffers
        out = buffers.attention_of(number, mix.o.product.width)
        if mix.recurrent is not None:
            self._recur(index, layer, mix, stream, work, out)
            return out
        qkv = buffers.qkv_of(number, mix.qkv.product.outputs)
        self._products.multiply(stream, layer.attention_norm, mix.qkv, qkv)
        queries = self._mixers.store(index, mix, qkv, tokens.positions, tokens.rows)
        if leaves_keys:
            return out
        if slots := decodes.slots:
            rows, positions = tokens.rows[:slots], tokens.positions[:slots]
            self._mixers.decode(index, mix, queries[:slots], positions, rows, out[:slots], decodes.width)
        if work.prefill is not None:
            self._mixers.prefill(index, mix, queries, work.prefill, out)
        self._mixers.gate(index, qkv, out)
        return out

    def _recur(
        self, index: int, layer: LayerWeights, mix: MixWeights, stream: Stream, work: Pass, out: torch.Tensor
    ) -> None:
        path, decodes, number = self.recurrent, work.decodes, len(out)
        is_drafted = decodes.width > 1
        assert path is not None
        projected = self._buffers.qkv_of(number, mix.qkv.product.outputs)
        if is_drafted:
            projected = path.drafted(index, number)
        self._products.multiply(stream, layer.attention_norm, mix.qkv, projected)
        if decodes.slots:
            path.decode(index, mix, projected[: decodes.slots], out[: decodes.slots], is_drafted=is_drafted)
        if work.prefill is not None:
            path.prefill(index, mix, projected, out)

    def settle_states(
        self, rows: torch.Tensor, counts: torch.Tensor, *, width: int, saves: torch.Tensor | None = None
    ) -> None:
        """Settles the states of a step that verified drafts; see `RecurrentPath.settle`."""
        if self.recurrent is not None:
            self.recurrent.settle(self.weights.layers, rows, counts, width=width, saves=saves)
