"""The step program: a tape of operations built once for a model and a capacity, which every thread runs from end to
end over its own part. A step only fills in the step record. Entries that write apart need no barrier between them.
Once the last keys and values are stored, only the rows whose logits are wanted go on."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from itertools import pairwise

import numpy as np

from twostroke.backends.cpu.arguments import (
    MOST_LACKING_ROWS,
    PANEL_OUTPUTS,
    ActivationField,
    AttentionField,
    HighestField,
    KVGroupField,
    NormField,
    OperandField,
    RopeField,
    StepField,
    TapeField,
    Wait,
    float_bits,
)
from twostroke.backends.cpu.experts import ExpertRunner
from twostroke.backends.cpu.layer_input_program import LayerInputOperations
from twostroke.backends.cpu.layer_weights import LayerWeights, Projection
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros, padded, zeros
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.program_sizes import ModelParts, ProgramSizes
from twostroke.backends.cpu.rank_norm_program import Break
from twostroke.backends.cpu.recurrent_arguments import GatedNormField
from twostroke.backends.cpu.row_operations import Columns, Rows
from twostroke.backends.cpu.shape import activation_name, attended_widths, layer_shape, mlp_widths, mlps_of
from twostroke.backends.cpu.tape import Record, Tape
from twostroke.models.spec import GroupedAttention

NO_WINDOW = 1 << 30
ATTENTION_PIECES = 4


class Program(LayerInputOperations):
    """The tape of a model, with the buffers its operations pass on to each other."""

    def __init__(self, model: ModelParts, sizes: ProgramSizes) -> None:
        spec, weights, kv, taps, rows = model.spec, model.weights, model.kv, sizes.taps, sizes.rows
        max_tokens, threads = sizes.max_tokens, sizes.threads
        self._spec, self._kv, self._positions, self.sizes = spec, kv, model.positions, sizes
        self._narrows, self._activation = max_tokens > 1, activation_name(mlps_of(spec)[0])
        self.hidden = sizes.floats(spec.hidden_size)
        self.logits = float_zeros(sizes.max_logits + MOST_LACKING_ROWS, weights.head.width if weights.head else 0)
        self.highest = zeros((sizes.max_logits,), np.int32)
        """The place of each row's highest logit, or NOT_FINITE."""
        # One width for all layers: where rows stay with their threads, those of one must not lie over another's.
        self._projected = sizes.floats(max(map(self._projected_width, range(spec.num_layers), weights.layers)))
        self._inner = sizes.floats(max(_widest_inner(layer) for layer in weights.layers))
        self._joins, widths = sizes.joins, attended_widths(spec)
        is_normed = any(layer.sandwich_norms or layer.layer_input is not None for layer in spec.layers)
        self.block_output = float_zeros(rows if is_normed or sizes.joins else 0, spec.hidden_size)
        self._attended = sizes.floats(max(widths))
        self._wide_sums = float_zeros(rows if kv.shape.norms_over_ranks else 0, 2)  # of queries, and of keys
        self._ones = np.ones(max(kv.shape.head_dim, self._attended.shape[1]), dtype=np.float32)
        self._normed = sizes.operand(spec.hidden_size)
        self._mixed = {width: sizes.operand(width) for width in widths}
        inner = {
            width for name, found in mlp_widths(spec).items() if not name.startswith("experts'") for width in found
        }
        self._gated = {width: Operand(max_tokens, width, threads=threads) for width in inner}
        self._experts, self._expert_layers = self._expert_runner(model), 0
        self._routed = Operand(max_tokens if self._experts else 0, spec.hidden_size)
        is_apart = spec.moe is not None and (spec.moe.shared_gate or spec.moe.has_own_norms)
        self._shared_output = float_zeros(rows if is_apart else 0, spec.hidden_size)
        latent_size = 0 if spec.moe is None else spec.moe.latent_size or 0
        self._latent_rows = float_zeros(rows if latent_size else 0, latent_size)
        self.breaks: list[Break] = []
        self._rows = Rows(self.hidden, StepField.NUM_TOKENS, StepField.NUM_QUERY_BLOCKS, StepField.QUERY_BLOCKS)
        narrow_rows = sizes.max_logits + MOST_LACKING_ROWS if self._narrows else 0
        self._narrow_hidden = float_zeros(narrow_rows, spec.hidden_size)
        self._make_layer_inputs(max_tokens, narrow_rows, threads)
        self.taps = tuple(sizes.floats(spec.hidden_size) for _ in taps)  # [max_tokens, hidden] each
        keeping = (index for index, layer in enumerate(weights.layers) if layer.has_attention)
        self._last_keeping = max(index for index in keeping if spec.kv_source(index) == index)
        wanted_whole = max((self._last_keeping, *taps))
        is_late = wanted_whole in taps or weights.layers[self._last_keeping].recurrent is not None
        self._narrows_late = self._narrows and is_late
        self.tape = Tape(model.code)
        self._add_layer_inputs(weights.layer_inputs)
        for index, layer in enumerate(weights.layers):
            self._add_layer(index, layer)
            if index in taps:
                self._add_copy(self.taps[taps.index(index)])
            if self._narrows_late and index == wanted_whole:
                self._narrow(Wait.ALWAYS)
                self._count_among_wanted()
        self.last_hidden = self._rows.hidden
        """After the last layer, of the rows whose logits are wanted."""
        if weights.head is not None:
            self._add_head(weights.head, weights.final_norm)
        self.entries = self.tape.entries()
        self.segments = self._segments()
        """The entries up to each break, and those behind the last."""

    def _add_layer(self, index: int, layer: LayerWeights) -> None:
        if layer.has_attention:
            self._add_attention(index, layer)
        if self._rows.count is StepField.NUM_LOGITS:
            self._count_among_wanted()
        if layer.has_mlp:
            self._add_mlp(layer, layer.scale if layer.layer_input is None else 1.0)
        self._add_layer_input(index, layer.layer_input, layer.scale)

    def _projected_width(self, index: int, layer: LayerWeights) -> int:
        """Of what a row is projected to before it attends; values that keys are made into lie behind it."""
        own = self._spec.layers[index].attention
        made = own.kv_width if isinstance(own, GroupedAttention) and own.keys_are_values else 0
        return layer.attention_in.width + padded(made, PANEL_OUTPUTS)

    def _expert_runner(self, model: ModelParts) -> ExpertRunner | None:
        moe, layers = self._spec.moe, [layer.experts for layer in model.weights.layers if layer.experts is not None]
        if moe is None or not layers:
            return None
        hidden = moe.expert_hidden(self._spec.hidden_size)
        return ExpertRunner(moe, layers, hidden, self.sizes.max_tokens, model.code)

    def _segments(self) -> list[Record]:
        bounds = [0, *(stop.place for stop in self.breaks), len(self.entries)]
        segments = [self.entries[first:last] for first, last in pairwise(bounds)]
        for segment in segments:
            segment[-1, TapeField.WAIT] = Wait.ALWAYS
        return segments

    def _add_attention_in(self, layer: LayerWeights) -> None:
        """Queries, keys and values of all rows."""
        self._add_norm(self._normed, layer.attention_norm, layer.attention_in)
        self._add_projection(layer.attention_in, self._normed, self._projected)

    def _add_keys_and_values(self, index: int, layer: LayerWeights) -> None:
        """Up to where they are stored, and queries are rotated. Of a layer that reads another's, queries alone."""
        spec, own = self._spec, self._spec.layers[index].grouped
        place, shares = self._kv.places[spec.kv_source(index)], own.shares_kv_of is not None
        q_column, k_column, v_column, *_ = (*layer.attention_in.columns, 0, 0)
        v_column = layer.attention_in.width if own.keys_are_values else v_column
        self._add_attention_in(layer)
        if own.value_norm and not shares:
            source, target = (
                Columns(self._projected, column, own.head_dim, own.num_kv_heads)
                for column in (k_column if own.keys_are_values else v_column, v_column)
            )
            self._add_norm_columns(source, self._ones, spec.norm_eps, target=target)
        if own.norm_spans_heads:
            self._add_wide_norms(own, layer)
        rotation = self._positions.rotations[own.rope]
        assert q_column == 0
        rope: dict[IntEnum, int] = {
            RopeField.INPUT: address_of(self._projected),
            RopeField.STRIDE: self._projected.shape[1],
            RopeField.NUM_HEADS: own.num_heads,
            RopeField.NUM_KV_HEADS: 0 if shares else own.num_kv_heads,
            RopeField.K_OFFSET: k_column,
            RopeField.V_OFFSET: v_column,
            RopeField.EPSILON: float_bits(spec.norm_eps),
            RopeField.COSINES: address_of(rotation.cosines),
            RopeField.SINES: address_of(rotation.sines),
            RopeField.HALF: rotation.half,
            RopeField.GROWTH: address_of(self._positions.growth(own.growth)),
            RopeField.STORE: address_of(place.memory),
            RopeField.GROUP: group_field(place.group),
            RopeField.ROWS: self._rows.count,
            RopeField.POSITIONS: self._rows.positions,
        }
        if own.norms_rotated:
            rope |= {RopeField.LATE_Q_NORM: address_of(layer.q_norm), RopeField.LATE_K_NORM: address_of(layer.k_norm)}
        elif not own.norm_spans_heads:
            rope |= {RopeField.Q_NORM: address_of(layer.q_norm), RopeField.K_NORM: address_of(layer.k_norm)}
        self.tape.add("rope_and_store", rope, variant=self._variant(own))

    def _variant(self, own: GroupedAttention) -> str | None:
        """Of the code for this layer's heads; None: that of the first layer's."""
        key, first = (shape.attention_key for shape in (layer_shape(self._kv.shape, own), self._kv.shape))
        return None if key == first else key

    def _add_wide_norms(self, own: GroupedAttention, layer: LayerWeights) -> None:
        """Of queries, and of keys, over all heads of a row together. Whoever has rows here rotates them, too."""
        found = zip(layer.attention_in.columns, own.norm_widths, strict=False)
        columns = [Columns(self._projected, first, width) for first, width in found]
        norms = layer.q_norm, layer.k_norm
        if own.wide_norms is not None:
            self._add_norms_over_ranks(own.wide_norms, columns, norms)
            return
        for source, norm in zip(columns, norms, strict=True):
            self._add_norm_columns(source, norm, self._spec.norm_eps)

    def _add_attention(self, index: int, layer: LayerWeights) -> None:
        own, place = self._spec.layers[index].grouped, self._kv.places[self._spec.kv_source(index)]
        self._add_keys_and_values(index, layer)
        narrowing = self._narrow_in(index)
        attention: dict[IntEnum, int] = {
            AttentionField.QUERIES: address_of(self._projected),
            AttentionField.STRIDE: self._projected.shape[1],
            AttentionField.NUM_KV_HEADS: own.num_kv_heads,
            AttentionField.STORE: address_of(place.memory),
            AttentionField.GROUP: group_field(place.group),
            AttentionField.WINDOW: own.window or NO_WINDOW,
            AttentionField.SCALE: float_bits(own.scale),
            AttentionField.CAP: float_bits(own.softcap or 1.0),
            AttentionField.OUTPUT: address_of(self._attended),
            AttentionField.OUTPUT_STRIDE: self._attended.shape[1],
            AttentionField.NUM_BLOCKS: self._rows.num_blocks,
            AttentionField.BLOCKS: self._rows.blocks,
            AttentionField.SINKS: address_of(layer.sinks),
        }
        pieces, variant = ATTENTION_PIECES, self._variant(own)
        self.tape.add("attention", attention, pieces=pieces, pieces_of_many=pieces, variant=variant)
        self._add_attention_out(layer, narrowing)

    def _add_attention_out(self, layer: LayerWeights, narrowing: dict[IntEnum, int]) -> None:
        mixed = self._mixed[layer.attention_out.depth]
        if layer.has_output_gate:
            self._add_output_gate(layer, mixed, is_narrowing=bool(narrowing))
        else:
            sizes = {NormField.WIDTH: layer.attention_out.depth, NormField.STRIDE: self._attended.shape[1]}
            fields = self._norm_fields(self._attended, None) | sizes | narrowing
            self._add_row_operation("prepare", fields, mixed, layer.attention_out)
        self._add_to_residual(layer.attention_out, mixed, layer.post_attention_norm)

    def _add_output_gate(self, layer: LayerWeights, mixed: Operand, *, is_narrowing: bool) -> None:
        """What heads found passes by the sigmoid of the last of their projections."""
        fields: dict[IntEnum, int] = {
            GatedNormField.INPUT: address_of(self._attended),
            GatedNormField.WIDTH: self._attended.shape[1],
            GatedNormField.GATE: address_of(self._projected) + 4 * layer.attention_in.columns[-1],
            GatedNormField.GATE_STRIDE: self._projected.shape[1],
            GatedNormField.ROWS: self._rows.count,
            GatedNormField.GATHER: int(is_narrowing),
        }
        self._add_row_operation("prepare_gated", fields, mixed, layer.attention_out)

    def _add_copy(self, target: Floats) -> None:
        fields = self._norm_fields(self._rows.hidden, None) | {OperandField.FLOATS: address_of(target)}
        self.tape.add("prepare", fields, wait=Wait.ALWAYS)

    def _narrow_in(self, index: int) -> dict[IntEnum, int]:
        """Within the last layer that keeps something, once all rows have left behind what later ones read."""
        is_last = index == self._last_keeping
        return self._narrow() if is_last and self._narrows and not self._narrows_late else {}

    def _narrow(self, wait: Wait = Wait.NEVER) -> dict[IntEnum, int]:
        """From here on only the rows whose logits are wanted: their residual moves together. Returns what tells the
        operation that brings attention's output along to gather its rows."""
        narrow = Rows(self._narrow_hidden, StepField.NUM_LOGITS, StepField.NUM_LOGIT_BLOCKS, StepField.LOGIT_BLOCKS)
        gather: dict[IntEnum, int] = {NormField.GATHER: 1}
        self._rows, source = narrow, self._rows.hidden
        self._narrow_layer_inputs()
        fields = self._norm_fields(source, None) | gather | {OperandField.FLOATS: address_of(narrow.hidden)}
        self.tape.add("prepare", fields, wait=wait)  # attention neither reads nor writes it: no need to wait
        return gather

    def _count_among_wanted(self) -> None:
        """Behind the layer in which the other rows are left out: what layers that read others' KV attend by."""
        self._rows = replace(self._rows, blocks=StepField.NARROW_BLOCKS, positions=StepField.LOGIT_POSITIONS)

    def _add_head(self, head: Projection, final_norm: Floats) -> None:
        cap = self._spec.logits_softcap
        if not self._narrows:  # the one row there is wants logits, or none does
            self._rows = replace(self._rows, count=StepField.NUM_LOGITS)
        self._add_norm(self._normed, final_norm, head)
        self._add_projection(head, self._normed, self.logits)
        if cap is not None:
            fields: dict[IntEnum, int] = {
                ActivationField.INPUT: address_of(self.logits),
                ActivationField.STRIDE: head.width,
                ActivationField.ROWS: StepField.NUM_LOGITS,
                ActivationField.CAP: float_bits(cap),
            }
            self.tape.add("soft_cap", fields)
        highest: dict[IntEnum, int] = {
            HighestField.INPUT: address_of(self.logits),
            HighestField.STRIDE: head.width,
            HighestField.WIDTH: self._spec.num_logits,
            HighestField.ROWS: StepField.NUM_LOGITS,
            HighestField.OUTPUT: address_of(self.highest),
        }
        self.tape.add("highest", highest)


def group_field(group: int) -> int:
    """Where the step record has a KV group's fields."""
    return int(StepField.KV_GROUPS) + len(KVGroupField) * group


def _widest_inner(layer: LayerWeights) -> int:
    """Of what an MLP's gate and up leave side by side."""
    return max(layer.mlp_in.width, 0 if layer.shared is None else layer.shared.mlp_in.width)
