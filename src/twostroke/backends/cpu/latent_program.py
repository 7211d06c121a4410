"""The tape of a model with latent attention. A token leaves a latent and a rotated key behind; then each phase goes a
way of its own: decodes bring their queries into the latents' space and read nothing else, chunks have keys and values
made of latents, head by head."""

from __future__ import annotations

from enum import IntEnum

from twostroke.backends.cpu.arguments import (
    LatentAttentionField,
    LatentField,
    NormField,
    Wait,
    float_bits,
)
from twostroke.backends.cpu.latent_weights import LatentWeights
from twostroke.backends.cpu.layer_weights import LayerWeights
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.program import ATTENTION_PIECES, Program, group_field
from twostroke.backends.cpu.program_sizes import ModelParts, ProgramSizes
from twostroke.backends.cpu.shape import latent_shape
from twostroke.models.spec import LatentAttention


class LatentProgram(Program):
    def __init__(self, model: ModelParts, sizes: ProgramSizes) -> None:
        own, latent = model.spec.layers[0].attention, model.weights.layers[0].latent
        assert isinstance(own, LatentAttention) and latent is not None
        self._low = sizes.operand(own.query_rank or 0)
        self._queries = sizes.floats(0 if latent.query_b is None else latent.query_b.width)
        # Of decodes alone; only what is used takes memory.
        self._absorbed = sizes.floats(own.num_heads * latent_shape(own).kept_width)
        self._latents = sizes.floats(own.num_heads * own.rank)
        super().__init__(model, sizes)

    def _add_attention(self, index: int, layer: LayerWeights) -> None:
        own, latent = self._spec.layers[index].attention, layer.latent
        assert isinstance(own, LatentAttention) and latent is not None
        self._add_attention_in(layer)
        queries, stride = self._projected, self._projected.shape[1]
        if latent.query_b is not None:
            self._add_low_queries(own, layer, latent)
            queries, stride = self._queries, latent.query_b.width
        self._add_store(index, own, layer, latent, queries, stride)
        narrowing = self._narrow_in(index)
        self._add_reading(index, own, latent, queries, stride)
        self._add_attention_out(layer, narrowing)

    def _add_low_queries(self, own: LatentAttention, layer: LayerWeights, latent: LatentWeights) -> None:
        """Queries through a low rank, with a norm within."""
        assert own.query_rank is not None and latent.query_b is not None
        fields = self._norm_fields(self._projected, latent.query_norm) | {
            NormField.WIDTH: own.query_rank,
            NormField.STRIDE: self._projected.shape[1],
            NormField.EPSILON: float_bits(own.norm_eps),
        }
        self._add_row_operation("norm", fields, self._low, latent.query_b)
        self._add_projection(latent.query_b, self._low, self._queries)

    def _add_store(
        self,
        index: int,
        own: LatentAttention,
        layer: LayerWeights,
        latent: LatentWeights,
        queries: Floats,
        query_stride: int,
    ) -> None:
        place, rotation = self._kv.places[index], self._positions.rotations[own.rope]
        fields: dict[IntEnum, int] = {
            LatentField.INPUT: address_of(self._projected) + 4 * layer.attention_in.columns[1],
            LatentField.STRIDE: self._projected.shape[1],
            LatentField.QUERIES: address_of(queries),
            LatentField.QUERY_STRIDE: query_stride,
            LatentField.NORM: address_of(latent.latent_norm),
            LatentField.EPSILON: float_bits(own.norm_eps),
            LatentField.COSINES: address_of(rotation.cosines),
            LatentField.SINES: address_of(rotation.sines),
            LatentField.NEIGHBOURS: int(own.rope.pairs_neighbours),
            LatentField.GROWTH: address_of(self._positions.growth(own.growth)),
            LatentField.STORE: address_of(place.memory),
            LatentField.GROUP: group_field(place.group),
        }
        self.tape.add("latent_store", fields)

    def _add_reading(
        self, index: int, own: LatentAttention, latent: LatentWeights, queries: Floats, query_stride: int
    ) -> None:
        """Chunks attend beside what prepares decodes: neither reads what the other writes."""
        place, attended = self._kv.places[index], (self._attended, self._attended.shape[1])
        absorbed, latents = ((array, array.shape[1]) for array in (self._absorbed, self._latents))

        def add(name: str, source: tuple[Floats, int], target: tuple[Floats, int], wait: Wait) -> None:
            fields: dict[IntEnum, int] = {
                LatentAttentionField.QUERIES: address_of(source[0]),
                LatentAttentionField.STRIDE: source[1],
                LatentAttentionField.STORE: address_of(place.memory),
                LatentAttentionField.GROUP: group_field(place.group),
                LatentAttentionField.SCALE: float_bits(own.scale),
                LatentAttentionField.OUTPUT: address_of(target[0]),
                LatentAttentionField.OUTPUT_STRIDE: target[1],
                LatentAttentionField.KEY_B: address_of(latent.key_b),
                LatentAttentionField.VALUE_B: address_of(latent.value_b),
            }
            self.tape.add(name, fields, wait=wait, pieces=ATTENTION_PIECES, pieces_of_many=ATTENTION_PIECES)

        add("absorb_queries", (queries, query_stride), absorbed, Wait.NEVER)
        add("attend_expanded", (queries, query_stride), attended, Wait.ALWAYS)
        add("attend_latents", absorbed, latents, Wait.ALWAYS)
        add("expand_mixed", latents, attended, Wait.ALWAYS)
