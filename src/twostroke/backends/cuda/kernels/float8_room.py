"""Room for rows and weights as products in float8 take them, and weights of few bits brought to it. A matrix at a time
is brought there, and lies there until the next one."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits, unit_levels_into
from twostroke.backends.cuda.kernels.float8_products import Float8Rows, Float8Weights, quantise_groups
from twostroke.backends.cuda.kernels.float8_tiles import ROW_GROUP, scale_group, scale_groups, whole_fours
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix, levels_into
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, grouped_levels_into
from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH


class RowRoom:
    """For some rows of some width, of no more numbers in all than there is room for."""

    def __init__(self, num_values: int, device: torch.device | str) -> None:
        """`num_values`: of padded rows."""
        self.data = torch.zeros(num_values, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(num_values // ROW_GROUP, dtype=torch.float32, device=device)

    def rounded(self, x: torch.Tensor, *, in_fours: bool = False) -> Float8Rows:
        """x: [num_rows, width]. `in_fours`: rows that are nobody's follow, of whatever numbers lie there."""
        num_rows, groups = whole_fours(len(x)) if in_fours else len(x), -(-x.shape[1] // ROW_GROUP)
        numbers = self.data[: num_rows * groups * ROW_GROUP].view(num_rows, -1)
        rows = Float8Rows(numbers, self.scales[: num_rows * groups].view(groups, num_rows))
        quantise_groups(x, rows)
        return rows


def padded_width(width: int) -> int:
    return -(-width // ROW_GROUP) * ROW_GROUP


def weights_in_float8(
    held: FourBitMatrix | GroupedMatrix | ExpertUnits | ExpertMatrix, room: torch.Tensor
) -> Float8Weights:
    """Brought to `room`, of any type; those that lie by rows stay where they are."""
    if isinstance(held, ExpertMatrix):
        return Float8Weights(held.data, held.scales.transpose(1, 2), held.form.group)
    matrices = len(held.data) if isinstance(held, ExpertUnits) else 1
    code, rows, padded = held.code, held.rows, held.code.rounds(held.width) * LOW_BIT_DEPTH
    groups, own_bytes = scale_groups(code, held.width), room.view(torch.uint8)
    size, scale_bytes = matrices * rows * padded, 4 * matrices * groups * rows
    numbers = own_bytes[:size].view(matrices, rows, padded)
    scales = own_bytes[size : size + scale_bytes].view(torch.float32).view(matrices, groups, rows)
    if isinstance(held, ExpertUnits):
        unit_levels_into(held, numbers, scales)
    elif isinstance(held, GroupedMatrix):
        grouped_levels_into(held, numbers, scales)
    else:
        levels_into(held, numbers, scales)
    return Float8Weights(numbers, scales, scale_group(code))
