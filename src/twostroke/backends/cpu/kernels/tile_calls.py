"""Tiles as functions: one for each kind of weights, place they are read from, and height. A function's registers are
its own, and a product chooses heights by how many rows it has left, so that few are computed for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.backends.cpu.arguments import MOST_LACKING_ROWS, TILE_OUTPUTS, OperandField
from twostroke.backends.cpu.kernels.emitter import F32, I8, I32, I64, POINTER, Emitter, Value
from twostroke.backends.cpu.kernels.operation import Operation, quantised_stride, sum_pairs
from twostroke.backends.cpu.kernels.tile_weights import OpenedWeights, PackedWeights
from twostroke.backends.cpu.kernels.tiles import InputRow, Tile, float_tile, quantised_tile
from twostroke.backends.cpu.tile_kinds import BLOCK_GROUPS, OPENED_GROUP_BYTES, TileKind

_PARAMETERS = (
    ("values", POINTER),  # of the first row, as the other seven
    ("origins", POINTER),
    ("sums", POINTER),
    ("starts", POINTER),
    ("byte_starts", POINTER),
    ("half_offsets", POINTER),
    ("peaks", POINTER),
    ("peak_digits", POINTER),
    ("depth", I64),
    ("weights", POINTER),
    ("output", POINTER),
    ("output_stride", I64),  # floats from row to row
    ("bias", I64),
    ("accumulate", I64),
)


def tile_heights(tallest: int) -> list[int]:
    """The tallest, and halves of it down to one row."""
    return [tallest] if tallest == 1 else [tallest, *tile_heights(tallest // 2)]


def tallest_tile(e: Emitter, *, opened: bool) -> int:
    return e.isa.tile_rows if opened else e.isa.packed_rows


def tile_columns(e: Emitter, *, opened: bool) -> int:
    return e.isa.tile_columns if opened else 1


def _name(kind: TileKind, height: int, *, opened: bool) -> str:
    return f"tile_{kind.name.lower()}_{'opened' if opened else 'packed'}_{height}"


def emit_tiles(e: Emitter, kind: TileKind) -> None:
    for height in tile_heights(e.isa.packed_rows):
        _emit_tile(e, kind, height, opened=False)
    for height in tile_heights(e.isa.tile_rows) if kind.is_quantised else []:
        _emit_tile(e, kind, height, opened=True)


def _emit_tile(e: Emitter, kind: TileKind, height: int, *, opened: bool) -> None:
    with e.function(_name(kind, height, opened=opened), _PARAMETERS, apart=True) as values:
        first_row, (depth, weights), rest = values[:8], values[8:10], values[10:]
        groups = e.div(depth, kind.group_values)
        rows = [_row(e, kind, first_row, depth, index) for index in range(height)]
        if not kind.is_quantised:
            totals = float_tile(e, kind, weights, rows, depth)
        elif opened:
            totals = quantised_tile(e, OpenedWeights(e, kind, weights, groups), rows, groups)
        else:
            totals = quantised_tile(e, PackedWeights(e, kind, [weights], height), rows, groups)
        _store(e, totals, *rest)


def _row(e: Emitter, kind: TileKind, first: Sequence[Value], depth: Value, index: int) -> InputRow:
    values, origins, sums, starts, byte_starts, half_offsets, peaks, peak_digits = first
    if not kind.is_quantised:
        return InputRow(e.at(values, e.mul(depth, index), F32))
    groups = e.mul(e.div(depth, kind.group_values), index)
    return InputRow(
        e.at(values, e.mul(quantised_stride(e, depth), index)),
        e.at(origins, groups, F32),
        e.at(sums, e.mul(sum_pairs(e, depth), index), I32),
        e.at(starts, groups, I32),
        e.at(byte_starts, groups, I32),
        e.at(half_offsets, e.mul(groups, 2), I32),
        e.at(peaks, groups, I32),
        e.at(peak_digits, groups, I32),
    )


def _store(e: Emitter, totals: Tile, output: Value, stride: Value, bias: Value, accumulate: Value) -> None:
    outputs = [e.at(output, e.mul(stride, index), F32) for index in range(len(totals))]
    with e.when(e.is_nonzero(bias)):
        for total in totals:
            for index, cell in enumerate(total):
                cell.value = e.build.fadd(cell.value, e.load_floats(e.pointer(bias), TILE_OUTPUTS * index))
    with e.when(e.is_nonzero(accumulate)):
        for total, place in zip(totals, outputs, strict=True):
            for index, cell in enumerate(total):
                cell.value = e.build.fadd(cell.value, e.load_floats(place, TILE_OUTPUTS * index))
    for total, place in zip(totals, outputs, strict=True):
        for index, cell in enumerate(total):
            e.store_floats(cell.value, place, TILE_OUTPUTS * index)


@dataclass(frozen=True, slots=True)
class TileOutput:
    place: Value
    stride: Value
    bias: Value
    accumulate: Value


class TileCalls:
    """Calls of the tiles of one kind, over the input of one operation."""

    def __init__(self, op: Operation, kind: TileKind, depth: Value) -> None:
        e = self._e = op.emitter
        self._kind, self._depth = kind, depth
        self._stride = quantised_stride(e, depth) if kind.is_quantised else depth
        self.groups = e.div(depth, kind.group_values)
        self.tile_bytes = e.mul(self.groups, kind.group_bytes)
        if kind.shared_bytes:
            self.tile_bytes = e.add(self.tile_bytes, e.mul(e.div(self.groups, BLOCK_GROUPS), kind.shared_bytes))
        values = OperandField.QUANTISED if kind.is_quantised else OperandField.FLOATS
        fields = (
            values,
            OperandField.ORIGINS,
            OperandField.SUMS,
            OperandField.STARTS,
            OperandField.BYTE_STARTS,
            OperandField.HALF_OFFSETS,
            OperandField.PEAKS,
            OperandField.PEAK_DIGITS,
        )
        self._input = [op.operand_address(field) for field in fields]

    def _rows_from(self, row: Value) -> list[Value]:
        e = self._e
        values, origins, sums, starts, byte_starts, half_offsets, peaks, peak_digits = self._input
        groups = e.mul(row, self.groups)
        return [
            e.at(values, e.mul(row, self._stride), I8 if self._kind.is_quantised else F32),
            e.at(origins, groups, F32),
            e.at(sums, e.mul(row, sum_pairs(e, self._depth)), I32),
            e.at(starts, groups, I32),
            e.at(byte_starts, groups, I32),
            e.at(half_offsets, e.mul(groups, 2), I32),
            e.at(peaks, groups, I32),
            e.at(peak_digits, groups, I32),
        ]

    def call(self, height: int, row: Value, weights: Value, output: TileOutput, *, opened: bool) -> None:
        e = self._e
        results = [output.place, output.stride, output.bias, output.accumulate]
        e.call(_name(self._kind, height, opened=opened), [*self._rows_from(row), self._depth, weights, *results])

    def open(self, tile: Value, scratch: Value) -> None:
        """The panel that begins with this tile."""
        e = self._e
        panel = OpenedWeights(e, self._kind, scratch, self.groups)
        tiles = [e.at(tile, e.mul(self.tile_bytes, column)) for column in range(panel.columns)]
        panel.fill(PackedWeights(e, self._kind, tiles), self.groups)

    def opened_bytes(self) -> Value:
        """What an opened panel takes at most."""
        return self._e.mul(self.groups, self._e.isa.tile_columns * OPENED_GROUP_BYTES)

    def over_rows(
        self, start: Value, stop: Value, rows: Value, work: Callable[[int, Value], None], *, opened: bool
    ) -> None:
        """`work(height, row)` for rows from `start` below `stop`, the tallest tiles first. A tile of the tallest
        may compute the last of all `rows` together with some that are not there."""
        e, (tallest, *rest) = self._e, tile_heights(tallest_tile(self._e, opened=opened))
        if tallest > 2 * MOST_LACKING_ROWS:
            left = e.rem(e.sub(stop, start), tallest)
            nearly_whole = e.build.icmp_signed(">=", left, e.integer(tallest - MOST_LACKING_ROWS))
            is_last = e.build.icmp_signed("==", stop, rows)
            raised = e.add(stop, e.sub(e.integer(tallest), left))
            stop = e.build.select(e.build.and_(nearly_whole, is_last), raised, stop)
        with e.loop(start, e.sub(stop, tallest - 1), tallest) as row:
            work(tallest, row)
        left = e.rem(e.sub(stop, start), tallest)
        row = e.variable(I64, e.sub(stop, left))
        for height in rest:
            with e.when(e.build.icmp_signed(">=", e.sub(stop, row.value), e.integer(height))):
                work(height, row.value)
                row.value = e.add(row.value, height)
