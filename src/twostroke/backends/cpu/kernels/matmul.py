"""Matrix products of the tape: output[rows, outputs] = input x weights, a bias and what the output held added on
request. One row streams the packed weights once; more rows go by panels, opened once where that pays. Threads share
the (panel, rows) plane evenly."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.backends.cpu.arguments import TILE_OUTPUTS, MatmulField, OperandField, TileKind
from twostroke.backends.cpu.kernels.emitter import F32, I32, Emitter, Value
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.kernels.tiles import (
    InputRow,
    PackedQ4,
    PackedQ8,
    Tile,
    UnpackedQ4,
    float_tile,
    quantised_tile,
)

TileMaker = Callable[[list[InputRow]], Tile]


def matmul_name(kind: TileKind) -> str:
    return f"matmul_{kind.name.lower()}"


def emit_matmul(e: Emitter, kind: TileKind) -> None:
    with operation(e, matmul_name(kind)) as op:
        product = _Product(op, kind)
        rows = op.step_integer(op.integer(MatmulField.ROWS))
        with e.build.if_else(e.build.icmp_signed("==", rows, e.integer(1))) as (single, several):
            with single:
                product.emit_single_row()
            with several:
                product.emit_panels(rows)


class _Product:
    def __init__(self, op: Operation, kind: TileKind) -> None:
        e = self._e = op.emitter
        self._op, self._kind = op, kind
        self._depth = op.integer(MatmulField.DEPTH)
        self._groups = e.div(self._depth, kind.group_values)
        self._tile_bytes = e.mul(self._groups, kind.group_bytes)
        self._num_tiles = op.integer(MatmulField.NUM_TILES)
        self._weights = op.address(MatmulField.WEIGHTS)
        self._output = op.address(MatmulField.OUTPUT)
        self._stride = op.integer(MatmulField.OUTPUT_STRIDE)
        self._bias = op.integer(MatmulField.BIAS)
        self._accumulate = op.integer(MatmulField.ACCUMULATE)

    def emit_single_row(self) -> None:
        e = self._e
        row = self._input_row(e.integer(0))
        first, last = self._op.share(self._num_tiles)
        with e.loop(first, last) as tile:
            place = e.at(self._weights, e.mul(tile, self._tile_bytes))
            self._store(self._packed_tile([place], prefetch=True)([row]), e.integer(0), tile)

    def emit_panels(self, rows: Value) -> None:
        """The plane of (panel, block of rows) is cut into equal runs, panel by panel; a run may begin and end inside
        a panel."""
        e, isa = self._e, self._e.isa
        blocks = e.larger(e.div(e.add(rows, isa.tile_rows - 1), isa.tile_rows), 1)
        live = e.build.select(e.is_nonzero(rows), e.div(self._num_tiles, isa.tile_columns), e.integer(0))
        first, last = self._op.share(e.mul(live, blocks))
        with e.loop(e.div(first, blocks), e.div(e.add(last, e.sub(blocks, 1)), blocks)) as panel:
            start = e.larger(e.sub(first, e.mul(panel, blocks)), 0)
            stop = e.smaller(e.sub(last, e.mul(panel, blocks)), blocks)
            tile = e.mul(panel, isa.tile_columns)
            places = [
                e.at(self._weights, e.mul(e.add(tile, column), self._tile_bytes)) for column in range(isa.tile_columns)
            ]
            make = self._opened_panel(places) if self._kind is TileKind.Q4_1 else self._packed_tile(places)
            with e.loop(start, stop) as block:
                row = e.mul(block, isa.tile_rows)
                inputs = [self._input_row(e.add(row, index)) for index in range(isa.tile_rows)]
                self._store(make(inputs), row, tile)

    def _input_row(self, row: Value) -> InputRow:
        e, op = self._e, self._op
        if not self._kind.is_quantised:
            return InputRow(e.at(op.operand_address(OperandField.FLOATS), e.mul(row, self._depth), F32))
        groups = e.mul(row, self._groups)
        return InputRow(
            e.at(op.operand_address(OperandField.QUANTISED), e.mul(row, self._depth)),
            e.at(op.operand_address(OperandField.SCALES), groups, F32),
            e.at(op.operand_address(OperandField.SUMS), groups, F32),
            e.at(op.operand_address(OperandField.OFFSETS), groups, I32),
            e.at(op.operand_address(OperandField.PEAKS), groups, I32),
            e.at(op.operand_address(OperandField.PEAK_DIGITS), groups, I32),
        )

    def _packed_tile(self, places: list[Value], *, prefetch: bool = False) -> TileMaker:
        e, kind = self._e, self._kind
        if kind is TileKind.Q4_1:
            return lambda rows: quantised_tile(e, PackedQ4(e, places, prefetch=prefetch), rows, self._groups)
        if kind is TileKind.Q8_0:
            return lambda rows: quantised_tile(e, PackedQ8(e, places, prefetch=prefetch), rows, self._groups)
        return lambda rows: float_tile(e, kind, places, rows, self._depth)

    def _opened_panel(self, places: list[Value]) -> TileMaker:
        e = self._e
        panel = UnpackedQ4(e, self._op.scratch, self._groups, len(places))
        panel.fill(PackedQ4(e, places), self._groups)
        return lambda rows: quantised_tile(e, panel, rows, self._groups)

    def _store(self, totals: Tile, row: Value, tile: Value) -> None:
        e = self._e
        column = e.mul(tile, TILE_OUTPUTS)
        outputs = [
            e.at(self._output, e.add(e.mul(e.add(row, index), self._stride), column), F32)
            for index in range(len(totals))
        ]
        with e.when(e.is_nonzero(self._bias)):
            bias = e.at(e.pointer(self._bias), column, F32)
            for total in totals:
                for index, cell in enumerate(total):
                    cell.value = e.build.fadd(cell.value, e.load_floats(bias, TILE_OUTPUTS * index))
        with e.when(e.is_nonzero(self._accumulate)):
            for total, output in zip(totals, outputs, strict=True):
                for index, cell in enumerate(total):
                    cell.value = e.build.fadd(cell.value, e.load_floats(output, TILE_OUTPUTS * index))
        for total, output in zip(totals, outputs, strict=True):
            for index, cell in enumerate(total):
                e.store_floats(cell.value, output, TILE_OUTPUTS * index)
