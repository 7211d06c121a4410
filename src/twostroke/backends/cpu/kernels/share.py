"""The expert that every row meets, where it has a router of its own: one number a row, whose sigmoid is its share."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import ShareField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, Emitter
from twostroke.backends.cpu.kernels.operation import operation


def emit_share(e: Emitter) -> None:
    """target[row] (+)= sigmoid(router . normed[row]) * input[row]"""
    with operation(e, "share") as op:
        width, router = op.integer(ShareField.WIDTH), op.address(ShareField.ROUTER)
        first, last = op.own_rows(op.step_integer(op.integer(ShareField.ROWS)))
        accumulates = e.is_nonzero(op.integer(ShareField.ACCUMULATE))
        with e.loop(first, last) as row:
            values, normed, target = (
                e.at(op.address(field), e.mul(row, width), F32)
                for field in (ShareField.INPUT, ShareField.NORMED, ShareField.TARGET)
            )
            total = e.variable(F32X16, e.floats(0.0))
            with e.loop(0, width, 16) as place:
                total.value = e.multiply_add(e.load_floats(normed, place), e.load_floats(router, place), total.value)
            share = e.sigmoid_product(e.floats(1.0), e.splat(e.reduce_sum(total.value)))
            with e.loop(0, width, 16) as place:
                held = e.build.select(accumulates, e.load_floats(target, place), e.floats(0.0))
                e.store_floats(e.multiply_add(share, e.load_floats(values, place), held), target, place)
