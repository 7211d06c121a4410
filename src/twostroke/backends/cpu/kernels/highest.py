"""The highest logit of each row: what greedy sampling chooses, found while the logits are still near. A row is one
thread's work."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import NOT_FINITE, HighestField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I32X16, LANES, Emitter
from twostroke.backends.cpu.kernels.operation import operation

_INFINITY_BITS = 0x7F800000
_NO_PLACE = 0x7FFFFFFF


def emit_highest(e: Emitter) -> None:
    """output[row] = the place of the largest of input[row], the first of equal ones; NOT_FINITE where one is not."""
    with operation(e, "highest") as op:
        build = e.build
        stride, width = op.integer(HighestField.STRIDE), op.integer(HighestField.WIDTH)
        first, last = op.share(op.step_integer(op.integer(HighestField.ROWS)))
        end = e.splat(build.trunc(width, I32))
        with e.loop(first, last) as row:
            values = e.at(op.address(HighestField.INPUT), e.mul(row, stride), F32)
            best = e.variable(F32X16, e.floats(float("-inf")))
            places = e.variable(I32X16, e.ints(_NO_PLACE))
            magnitude = e.variable(I32X16, e.ints(0))
            with e.loop(0, width, LANES) as index:
                value = e.load_floats(values, index)
                here = build.add(e.splat(build.trunc(index, I32)), e.ints(range(LANES)))
                inside = build.icmp_signed("<", here, end)  # a row has room for whole vectors
                bits = build.and_(build.bitcast(value, I32X16), e.ints(0x7FFFFFFF))
                # Magnitudes are ordered by their bits, NaN above infinity.
                magnitude.value = e.larger_integer(magnitude.value, build.select(inside, bits, e.ints(0)))
                higher = build.and_(inside, build.fcmp_ordered(">", value, best.value))
                best.value = build.select(higher, value, best.value)
                places.value = build.select(higher, here, places.value)
            highest = e.splat(e.reduce(best.value, e.larger_float))
            equal = build.fcmp_ordered("==", best.value, highest)
            candidates = build.select(equal, places.value, e.ints(_NO_PLACE))
            place = e.reduce(candidates, lambda a, b: build.select(build.icmp_signed("<", a, b), a, b))
            finite = build.icmp_signed("<", e.reduce(magnitude.value, e.larger_integer), I32(_INFINITY_BITS))
            output = e.at(op.address(HighestField.OUTPUT), row, I32)
            e.store(build.select(finite, place, I32(NOT_FINITE)), output, 4)
