"""The tape of a model some of whose layers keep a state. Within such a layer tokens of one sequence go one after the
other, so threads share the numbers of a state between them, and not the rows."""

from __future__ import annotations

from enum import IntEnum

from twostroke.backends.cpu.arguments import Wait
from twostroke.backends.cpu.layer_weights import LayerWeights
from twostroke.backends.cpu.memory import float_zeros
from twostroke.backends.cpu.program import ATTENTION_PIECES, Program, group_field
from twostroke.backends.cpu.program_sizes import ModelParts, ProgramSizes
from twostroke.backends.cpu.rank_norms import NormedGroup, RankSquares
from twostroke.backends.cpu.recurrent import Projected, RecurrentOperations, RecurrentVectors
from twostroke.backends.cpu.recurrent_shape import projected_names
from twostroke.backends.cpu.row_operations import Columns
from twostroke.models.spec import Mamba2, NormPart, Recurrent


class RecurrentProgram(Program):
    def __init__(self, model: ModelParts, sizes: ProgramSizes) -> None:
        spec = model.spec
        self._mixer = next(one for layer in spec.layers if isinstance(one := layer.attention, Recurrent))
        self._recurrent = RecurrentOperations(self._mixer, sizes.rows, spec.norm_eps)
        # Apart from what attention's layers are projected to: those have rows of another width, and a thread that is
        # ahead in one layer must not write over rows that another still reads in the layer before.
        own = (layer.attention_in.width for layer in model.weights.layers if layer.recurrent is not None)
        self._inputs = sizes.floats(max(own))
        self._sums = float_zeros(sizes.rows if model.kv.shape.norms_over_ranks else 0, 1)
        self._recurred = sizes.operand(self._recurrent.width)
        super().__init__(model, sizes)

    def _add_attention(self, index: int, layer: LayerWeights) -> None:
        if layer.recurrent is None:
            super()._add_attention(index, layer)
            return
        number, states = self._kv.states_of(index)
        # Whoever goes through a sequence's rows reads those of other threads.
        self._add_norm(self._normed, layer.attention_norm, layer.attention_in)
        self._add_projection(layer.attention_in, self._normed, self._inputs, wait=Wait.ALWAYS)
        columns = dict(zip(projected_names(self._mixer), layer.attention_in.columns, strict=True))
        projected, vectors = Projected(self._inputs, self._inputs.shape[1], columns), layer.recurrent

        def fields_of(part: int) -> dict[IntEnum, int]:
            return states.fields(index, group_field(number), part)

        for name, fields in self._recurrent.operations(vectors, projected, fields_of, self._rows.count):
            self.tape.add(name, fields, pieces=ATTENTION_PIECES, pieces_of_many=ATTENTION_PIECES)
        part = self._mixer.norm_part if isinstance(self._mixer, Mamba2) else None
        if part is not None:
            self._add_norm_over_ranks(part, vectors, projected)
        preparation = self._recurrent.preparation(vectors, projected, self._rows.count)
        name, fields = preparation or ("prepare", self._norm_fields(self._recurrent.output, None))
        self._add_row_operation(name, fields, self._recurred, layer.attention_out)
        self._add_to_residual(layer.attention_out, self._recurred, layer.post_attention_norm)

    def _add_norm_over_ranks(self, part: NormPart, vectors: RecurrentVectors, projected: Projected) -> None:
        """The gated norm of a Mamba-2 of whose heads other ranks have some, in place."""
        found, width = self._recurrent.output, self._recurrent.width
        source, gate = Columns(found, 0, width), Columns(projected.values, projected.columns["z"], width)
        squares = RankSquares(self._sums, (NormedGroup(part.group, part.width),), part.num_groups)
        self._add_squares(squares, [source], gate)
        self._add_scale(squares, 0, source, vectors.norm, self._recurrent.norm_eps, Wait.ALWAYS)
