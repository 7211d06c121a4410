"""Norms of numbers that lie on several ranks: the squares of this rank's, and its numbers scaled once the squares of
all are known. A row is one thread's work. `norms.py` has those of one rank alone."""

from __future__ import annotations

from twostroke.backends.cpu.kernels.emitter import F32, F32X16, LANES, Emitter
from twostroke.backends.cpu.kernels.operation import operation
from twostroke.backends.cpu.rank_norms import ScaleField, SquaresField


def emit_squares(e: Emitter) -> None:
    """sums[row] = the sum of squares of input[row], which passes its gate before, if it has one, and stays so."""
    with operation(e, "squares") as op:
        width, gates = op.integer(SquaresField.WIDTH), op.integer(SquaresField.GATE)
        first, last = op.own_rows(op.step_integer(op.integer(SquaresField.ROWS)))
        with e.loop(first, last) as row:
            values = e.at(op.address(SquaresField.INPUT), e.mul(row, op.integer(SquaresField.STRIDE)), F32)
            with e.when(e.is_nonzero(gates)):
                gate = e.at(e.pointer(gates), e.mul(row, op.integer(SquaresField.GATE_STRIDE)), F32)
                with e.loop(0, width, LANES) as place:
                    opened = e.load_floats(gate, place)
                    product = e.build.fmul(e.load_floats(values, place), opened)
                    e.store_floats(e.sigmoid_product(product, opened), values, place)
            total = e.variable(F32X16, e.floats(0.0))
            with e.loop(0, width, LANES) as place:
                value = e.load_floats(values, place)
                total.value = e.multiply_add(value, value, total.value)
            place_of_sum = e.mul(row, op.integer(SquaresField.SUMS_STRIDE))
            e.store(e.reduce_sum(total.value), e.at(op.address(SquaresField.SUMS), place_of_sum, F32))


def emit_scale(e: Emitter) -> None:
    """input[row] *= weight / sqrt(sums[row] / total width + epsilon)"""
    with operation(e, "scale") as op:
        width, weight = op.integer(ScaleField.WIDTH), op.address(ScaleField.WEIGHT)
        total = e.build.sitofp(op.integer(ScaleField.TOTAL_WIDTH), F32)
        first, last = op.own_rows(op.step_integer(op.integer(ScaleField.ROWS)))
        with e.loop(first, last) as row:
            values = e.at(op.address(ScaleField.INPUT), e.mul(row, op.integer(ScaleField.STRIDE)), F32)
            sum_of_all = e.load_at(F32, op.address(ScaleField.SUMS), e.mul(row, op.integer(ScaleField.SUMS_STRIDE)))
            mean = e.build.fadd(e.build.fdiv(sum_of_all, total), op.float(ScaleField.EPSILON))
            inverse = e.splat(e.build.fdiv(F32(1.0), e.square_root(mean)))
            with e.loop(0, width, LANES) as place:
                normed = e.build.fmul(e.load_floats(values, place), inverse)
                e.store_floats(e.build.fmul(normed, e.load_floats(weight, place)), values, place)
