"""Matrix products of the tape: output[rows, outputs] = input x weights, a bias and what the output held added on
request; and the gated pair of them. One row streams the packed weights once; a few rows read each panel of them while
it is near; many rows open it first. Parts share the (panel, rows) plane evenly."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.backends.cpu.arguments import FEW_ROWS, TILE_OUTPUTS, GatedField, MatmulField
from twostroke.backends.cpu.kernels.activation import joined
from twostroke.backends.cpu.kernels.emitter import F32, I1, I64, POINTER, VOID, Emitter, Value
from twostroke.backends.cpu.kernels.operation import OperandWriter, Operation, operation, rows_stay
from twostroke.backends.cpu.kernels.tile_calls import TileCalls, TileOutput, tallest_tile, tile_columns
from twostroke.backends.cpu.tile_kinds import TileKind

JOINED_ROWS = 16
"""Rows of a gated product that are joined at once: the long chains of operations of several rows overlap."""
TILE_SCRATCH_BYTES = JOINED_ROWS * 4 * TILE_OUTPUTS * 4
"""What their results take, before they are joined."""
_JOIN = "join_gated"
_JOIN_PARAMETERS = (
    ("target", POINTER),
    ("part", I64),
    ("thread", I64),
    ("stay", I1),
    ("results", POINTER),
    ("row", I64),
    ("count", I64),
    ("group", I64),
    ("width", I64),
)


def matmul_name(kind: TileKind) -> str:
    return f"matmul_{kind.name.lower()}"


def gated_name(kind: TileKind) -> str:
    return f"matmul_gated_{kind.name.lower()}"


def emit_matmul(e: Emitter, kind: TileKind) -> None:
    with operation(e, matmul_name(kind)) as op:
        rows = op.rows_in(MatmulField.ROWS)
        _few_or_many(e, kind, rows, _Product(op, kind).emit)


def emit_gated_matmul(e: Emitter, kind: TileKind) -> None:
    """target[row] = activation(gate(input[row])) * up(input[row]), with the activation of `emit_join`"""
    with operation(e, gated_name(kind)) as op:
        rows = op.rows_in(GatedField.ROWS)
        _few_or_many(e, kind, rows, _GatedProduct(op, kind).emit)


def emit_join(e: Emitter, activation: str) -> None:
    """Rows of one group: activation(gate) * up, from what tiles left in scratch into the target. Products of every
    kind call it, from other modules: they are the same for every activation."""
    with e.function(_JOIN, _JOIN_PARAMETERS) as values:
        target, part, thread, stay, results, row, count, group, width = values
        op = Operation(e, [target, None, part, None, thread, None, None], stay)
        with e.loop(0, count) as index:
            place = e.at(results, e.mul(index, 4 * TILE_OUTPUTS), F32)
            gates, ups = ([e.load_floats(place, first + half) for half in (0, TILE_OUTPUTS)] for first in (0, 32))
            halves = [joined(e, activation, gate, up) for gate, up in zip(gates, ups, strict=True)]
            OperandWriter(op, e.add(row, index), width).write_group(group, *halves)


def _few_or_many(e: Emitter, kind: TileKind, rows: Value, emit: Callable[[Value, bool], None]) -> None:
    """Opening a panel costs many rows less than reading its packed form for every few of them."""
    if not kind.is_quantised:
        emit(rows, False)
        return
    with e.build.if_else(e.build.icmp_signed("<", rows, e.integer(FEW_ROWS))) as (few, many):
        with few:
            emit(rows, False)
        with many:
            emit(rows, True)


def _over_plane(
    op: Operation, panels: Value, height: int, rows: Value, work: Callable[[Value, Value, Value], None]
) -> None:
    """`work(panel, first row, row after the last)` for the wanted part of the plane of (panel, block of rows).

    Where rows stay with their threads, it is cut by them, and each part begins at panels of its own: two that ask for
    the same weights at once get in each other's way. Else it is cut into equal runs, panel by panel; a run may
    begin and end inside a panel."""
    e = op.emitter
    blocks = e.larger(e.div(e.add(rows, height - 1), height), 1)
    live = e.build.select(e.is_nonzero(rows), panels, e.integer(0))
    by_rows, select = rows_stay(e, rows, op.threads), e.build.select
    first_row, last_row = op.own_rows(rows)
    first, last = op.share(e.mul(live, blocks))
    first_panel = select(by_rows, e.integer(0), e.div(first, blocks))
    last_panel = select(by_rows, live, e.div(e.add(last, e.sub(blocks, 1)), blocks))
    offset = select(by_rows, e.div(e.mul(live, op.part), op.parts), e.integer(0))
    with e.loop(first_panel, last_panel) as index:
        moved = e.add(index, offset)
        wraps = e.build.and_(by_rows, e.build.icmp_signed(">=", moved, live))
        panel = select(wraps, e.sub(moved, live), moved)
        before = e.mul(panel, blocks)
        start = e.mul(e.larger(e.sub(first, before), 0), height)
        stop = e.smaller(e.mul(e.smaller(e.sub(last, before), blocks), height), rows)
        work(panel, select(by_rows, first_row, start), select(by_rows, last_row, stop))


class _Product:
    def __init__(self, op: Operation, kind: TileKind) -> None:
        self._e, self._op = op.emitter, op
        self._tiles = TileCalls(op, kind, op.integer(MatmulField.DEPTH))

    def _output(self, row: Value, tile: Value) -> TileOutput:
        e, op = self._e, self._op
        stride, column = op.integer(MatmulField.OUTPUT_STRIDE), e.mul(tile, TILE_OUTPUTS)
        bias = op.integer(MatmulField.BIAS)
        own_bias = e.build.select(e.is_nonzero(bias), e.add(bias, e.mul(column, 4)), bias)
        place = e.at(op.address(MatmulField.OUTPUT), e.add(e.mul(row, stride), column), F32)
        return TileOutput(place, stride, own_bias, op.integer(MatmulField.ACCUMULATE))

    def emit(self, rows: Value, opened: bool) -> None:
        e, op = self._e, self._op
        columns = tile_columns(e, opened=opened)

        def sweep(panel: Value, start: Value, stop: Value) -> None:
            tile = e.mul(panel, columns)
            weights = e.at(op.address(MatmulField.WEIGHTS), e.mul(tile, self._tiles.tile_bytes))
            if opened:
                self._tiles.open(weights, op.scratch)
                weights = op.scratch

            def multiply(height: int, row: Value) -> None:
                output = self._output(row, tile)
                self._tiles.call(height, row, weights, output, opened=opened)

            self._tiles.over_rows(start, stop, rows, multiply, opened=opened)

        panels = e.div(op.integer(MatmulField.NUM_TILES), columns)
        _over_plane(op, panels, tallest_tile(e, opened=opened), rows, sweep)


class _GatedProduct:
    """A panel is one group of outputs: two tiles of the gate and the same two of up, whose results meet in scratch as
    [rows][two of gate, two of up][16]."""

    def __init__(self, op: Operation, kind: TileKind) -> None:
        self._e, self._op = op.emitter, op
        self._tiles = TileCalls(op, kind, op.integer(GatedField.DEPTH))
        self._target = op.shifted(GatedField.TARGET_FLOATS)
        self._num_tiles = op.integer(GatedField.NUM_TILES)

    def emit(self, rows: Value, opened: bool) -> None:
        e = self._e

        def sweep(panel: Value, start: Value, stop: Value) -> None:
            places = self._places(panel, tile_columns(e, opened=opened))
            if opened:
                places = [self._open(place, index) for index, place in enumerate(places)]

            with e.loop(start, stop, JOINED_ROWS) as first:

                def multiply(height: int, row: Value) -> None:
                    self._call_tiles(places, height, row, e.sub(row, first), opened)

                after = e.smaller(e.add(first, JOINED_ROWS), stop)
                self._tiles.over_rows(first, after, rows, multiply, opened=opened)
                target, width = self._target, e.mul(self._num_tiles, TILE_OUTPUTS)
                place = [target.arguments, target.part, target.thread, target.stay, self._op.scratch]
                rows_written = [first, e.sub(after, first), panel, width]
                e.external(_JOIN, VOID, [kind for _, kind in _JOIN_PARAMETERS], [*place, *rows_written])

        _over_plane(self._op, e.div(self._num_tiles, 2), tallest_tile(e, opened=opened), rows, sweep)

    def _places(self, panel: Value, columns: int) -> list[Value]:
        """Where each call of a tile begins to read; each reads `columns` columns."""
        e, tile_bytes = self._e, self._tiles.tile_bytes
        gate = e.at(self._op.address(GatedField.WEIGHTS), e.mul(e.mul(panel, 2), tile_bytes))
        up = e.at(gate, self._op.integer(GatedField.UP_BYTES))
        return [e.at(first, e.mul(tile_bytes, column)) for first in (gate, up) for column in range(0, 2, columns)]

    def _open(self, place: Value, index: int) -> Value:
        e = self._e
        scratch = e.at(self._op.scratch, e.add(e.mul(self._tiles.opened_bytes(), index), TILE_SCRATCH_BYTES))
        self._tiles.open(place, scratch)
        return scratch

    def _call_tiles(self, places: list[Value], height: int, row: Value, place_of_row: Value, opened: bool) -> None:
        e, none, stride = self._e, self._e.integer(0), 4 * TILE_OUTPUTS
        for index, place in enumerate(places):
            column = index * 4 // len(places) * TILE_OUTPUTS
            target = e.at(self._op.scratch, e.add(e.mul(place_of_row, stride), column), F32)
            output = TileOutput(target, e.integer(stride), none, none)
            self._tiles.call(height, row, place, output, opened=opened)
