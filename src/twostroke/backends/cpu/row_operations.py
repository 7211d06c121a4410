"""What any tape does with rows: norms, the inputs of matrix products, and the products. Knows nothing of layers:
`program.py` puts them together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from twostroke.backends.cpu.arguments import (
    MOST_PIECES,
    ColumnsField,
    MatmulField,
    NormField,
    StepField,
    Wait,
    float_bits,
)
from twostroke.backends.cpu.layer_weights import Projection
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.packing import PackedMatrix
from twostroke.backends.cpu.program_sizes import ProgramSizes
from twostroke.backends.cpu.tape import Tape
from twostroke.models.spec import ModelSpec

PIECE_BYTES = 96 << 10
"""Weights of a piece of a product, at least: some microseconds of reading, beside which dealing it out is nothing."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows operations work on: their residual, and where the step record has their number and their queries."""

    hidden: Floats  # [rows, hidden]
    count: StepField
    num_blocks: StepField
    blocks: StepField
    positions: StepField = StepField.POSITIONS


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Some columns of a buffer's rows, in parts side by side."""

    buffer: Floats
    first: int
    width: int
    count: int = 1

    @property
    def place(self) -> int:
        return address_of(self.buffer) + 4 * self.first

    @property
    def stride(self) -> int:
        return int(self.buffer.shape[1])


class RowOperations:
    """Adds them to a tape, for the rows that it is at."""

    tape: Tape
    _spec: ModelSpec
    _rows: Rows
    sizes: ProgramSizes

    def _norm_fields(self, source: Floats, weight: Floats | None) -> dict[IntEnum, int]:
        return {
            NormField.INPUT: address_of(source),
            NormField.WIDTH: source.shape[1],
            NormField.WEIGHT: address_of(weight),
            NormField.EPSILON: float_bits(self._spec.norm_eps),
            NormField.ROWS: self._rows.count,
        }

    def _add_norm(self, operand: Operand, weight: Floats | None, reader: Projection) -> None:
        """The residual as a projection's input; without a weight, as it is."""
        fields = self._norm_fields(self._rows.hidden, weight)
        self._add_row_operation("prepare" if weight is None else "norm", fields, operand, reader)

    def _add_norm_columns(
        self,
        source: Columns,
        weight: Floats | None,
        epsilon: float,
        *,
        target: Columns | None = None,
        accumulate: bool = False,
        wait: Wait = Wait.NEVER,
    ) -> None:
        """Each part by itself; in place without a `target`. What follows without a wait must take the same rows."""
        target = target or source
        fields: dict[IntEnum, int] = {
            ColumnsField.INPUT: source.place,
            ColumnsField.STRIDE: source.stride,
            ColumnsField.WIDTH: source.width,
            ColumnsField.COUNT: source.count,
            ColumnsField.WEIGHT: address_of(weight),
            ColumnsField.EPSILON: float_bits(epsilon),
            ColumnsField.ROWS: self._rows.count,
            ColumnsField.OUTPUT: target.place,
            ColumnsField.OUTPUT_STRIDE: target.stride,
            ColumnsField.ACCUMULATE: int(accumulate),
        }
        self.tape.add("norm_columns", fields, wait=wait)

    def _add_row_operation(
        self, function: str, fields: dict[IntEnum, int], operand: Operand, reader: Projection
    ) -> None:
        """Prepares the input of a projection, in the forms it reads. Threads that read copies of their own go on."""
        own = operand.copies > 1
        wait = Wait.NEVER if own else self._wait_for_rows()
        self.tape.add(function, fields | operand.fields(**forms_read(reader)), wait=wait, pieces=0 if own else 1)

    def _wait_for_rows(self) -> Wait:
        """After an operation on rows that others on rows follow. Of few rows, for the logits, none stay."""
        return Wait.UNLESS_ROWS_STAY if self._rows.count is StepField.NUM_TOKENS else Wait.ALWAYS

    def _add_projection(
        self,
        projection: Projection,
        operand: Operand,
        output: Floats,
        *,
        accumulate: bool = False,
        wait: Wait | None = None,
    ) -> None:
        """Its parts write columns of their own: one barrier, after the last; None: as suits rows."""
        last = self._wait_for_rows() if wait is None else wait
        for part in projection.parts:
            matrix = part.matrix
            fields: dict[IntEnum, int] = {
                MatmulField.WEIGHTS: address_of(matrix.data),
                MatmulField.DEPTH: matrix.depth,
                MatmulField.NUM_TILES: matrix.num_tiles,
                MatmulField.ROWS: self._rows.count,
                MatmulField.OUTPUT: address_of(output) + 4 * part.column,
                MatmulField.OUTPUT_STRIDE: output.shape[1],
                MatmulField.BIAS: address_of(part.bias),
                MatmulField.ACCUMULATE: int(accumulate),
            }
            fields |= operand.fields(floats=True, quantised=True, halves=True)
            name, pieces = f"matmul_{matrix.kind.name.lower()}", self._pieces(matrix)
            own_wait = last if part is projection.parts[-1] else Wait.NEVER
            self.tape.add(name, fields, wait=own_wait, matrix=matrix, pieces=pieces)

    def _pieces(self, matrix: PackedMatrix) -> int:
        return min(max(matrix.data.nbytes // (self.sizes.threads * PIECE_BYTES), 1), MOST_PIECES)


def forms_read(projection: Projection) -> dict[str, bool]:
    """The forms of its input that a projection reads: others are not written."""
    kinds = [part.matrix.kind for part in projection.parts]
    return {
        "floats": any(not kind.is_quantised for kind in kinds),
        "quantised": any(kind.is_quantised for kind in kinds),
        "halves": any(kind.is_quantised and kind.layout.scale_sets == 2 for kind in kinds),
    }
