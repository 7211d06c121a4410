"""How products with packed weights are cut: rules that hold for every shape."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.backends.cuda.packed_case import KINDS, SMS, held_rows, shapes

from twostroke.backends.cuda.kernels.packed_format import DEPTH, UNIT_ROWS
from twostroke.backends.cuda.kernels.packed_tiles import (
    DENSE_ROWS,
    ENOUGH,
    FEW_ROWS,
    MAX_DENSE_ROWS,
    MAX_SPLITS,
    MAX_STAGES,
    MAX_TURNS_ROWS,
    MAX_WHOLE_ROWS,
    MIN_WEIGHTS,
    MOST_SUMS,
    SHARED_BYTES,
    PackedTile,
    choose_packed_tile,
)
from twostroke.backends.cuda.products import ProductScratch
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, ModelSpec

QKV, OUT, GATE_UP, DOWN, HEAD = (96, 64), (64, 64), (448, 64), (64, 224), (2004, 64)
"""Units and rounds of an 8B's matrices."""


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 65, 96, 128, 160, 161, 200, 256])
def test_an_8b_s_matrices_are_cut_as_was_measured_best(rows: int) -> None:
    held = held_rows(rows)
    in_turns = PackedTile(held, 2, shared=True)
    gates = head = PackedTile(held, 2, 2 if rows <= 192 else 1) if rows <= MAX_WHOLE_ROWS else None
    if rows <= FEW_ROWS:
        gates, head = PackedTile(held, 2), PackedTile(held, 4)
    assert choose_packed_tile(rows, *QKV, SMS) == (in_turns if rows <= MAX_TURNS_ROWS else None)
    assert choose_packed_tile(rows, *GATE_UP, SMS, gated=True) == gates
    assert choose_packed_tile(rows, *HEAD, SMS, is_float32=True) == head
    assert choose_packed_tile(rows, *OUT, SMS, may_split=True) == PackedTile(held, 2, splits=2, shared=True)
    assert choose_packed_tile(rows, *DOWN, SMS, may_split=True) == PackedTile(held, 2, splits=4)


@pytest.mark.parametrize("num_sms", [78, 114, 132, 144])
def test_every_cut_fits_the_chip_and_covers_the_product(num_sms: int) -> None:
    num_found = 0
    for rows, (units, rounds), kind in product((1, 9, 17, 50, 64, 65, *DENSE_ROWS), shapes(), KINDS):
        tile = choose_packed_tile(rows, units, rounds, num_sms, **kind)
        if tile is None:
            continue
        num_found += 1
        assert tile.rows == held_rows(rows)
        assert 3 <= tile.held_stages <= MAX_STAGES and tile.shared_bytes <= SHARED_BYTES
        assert tile.stage_bytes % 1024 == 0  # where the copy engine's swizzle begins
        assert tile.units * tile.rows <= MOST_SUMS  # of two threads
        assert (
            rounds % tile.splits == 0
            and 1 <= tile.splits <= MAX_SPLITS
            and (tile.splits == 1 or kind == {"may_split": True})
        )
        rounds_of_group, left = divmod(rounds // tile.splits, tile.groups if tile.shared else 1)
        assert left == 0 and (rounds_of_group % 2 == 0 or tile.rows > FEW_ROWS)
        if tile.shared:
            assert not kind.get("gated") and -(-units // tile.units) * tile.splits <= num_sms
            # A group comes back to the same stages, and frees one when it has begun to multiply from the next.
            assert tile.held_stages % tile.groups == 0 and tile.held_stages >= 2 * tile.groups
            ring_bytes = tile.held_stages * tile.stage_bytes
            assert tile.groups * tile.units * tile.rows // 8 * 128 * 16 <= ring_bytes  # sums that groups add up there
        if tile.splits > 1:
            assert -(-units // tile.tile_units) * tile.splits <= num_sms  # in one wave
        if tile.splits == 1 and not tile.shared and kind != {"may_split": True}:
            assert -(-units // tile.tile_units) >= ENOUGH * num_sms
    assert num_found > 1000


def test_every_number_of_rows_has_a_tile_of_hardly_more() -> None:
    for rows in range(1, MAX_DENSE_ROWS + 1):
        tile = choose_packed_tile(rows, *DOWN, SMS, may_split=True)
        assert tile is not None and rows <= tile.rows == held_rows(rows) <= max(8, 2 * rows - 2)
        wide = choose_packed_tile(rows, *GATE_UP, SMS, gated=True)
        assert (wide is not None) == (rows <= MAX_WHOLE_ROWS)


def test_small_matrices_and_many_rows_are_left_to_others() -> None:
    units = MIN_WEIGHTS // (64 * UNIT_ROWS * DEPTH)
    assert choose_packed_tile(16, units, 64, SMS, may_split=True) is not None
    assert choose_packed_tile(16, units - 1, 64, SMS, may_split=True) is None
    assert choose_packed_tile(MAX_DENSE_ROWS + 1, *DOWN, SMS, may_split=True) is None
    assert choose_packed_tile(MAX_WHOLE_ROWS + 1, *GATE_UP, SMS, gated=True) is None
    assert choose_packed_tile(MAX_WHOLE_ROWS + 1, *HEAD, SMS, is_float32=True) is None
    assert choose_packed_tile(MAX_TURNS_ROWS + 1, *QKV, SMS) is None
    assert choose_packed_tile(16, 448, 63, SMS, gated=True) is None  # an odd number of rounds
    assert choose_packed_tile(16, 190, 64, SMS, gated=True) is None  # too few gates to fill the chip


@pytest.mark.parametrize("hidden", [512, 1024, 2048, 2560, 4096, 5120, 8192])
def test_parts_of_a_divided_depth_have_room(hidden: int) -> None:
    """The hidden size's matrices are those whose depth may be divided."""
    layer = LayerSpec(GroupedAttention(1, 1, 2, RopeSpec(1e4, 2)), DenseMlp(1))
    spec = ModelSpec("llama", 1, hidden, 1, (layer,), 1e-5)
    sums = ProductScratch(spec, 1, torch.bfloat16, torch.device("meta")).sums
    for rows, rounds, num_sms in product((64, 128, 200, MAX_DENSE_ROWS), (32, 128, 256, 512, 2048), (78, 132, 144)):
        tile = choose_packed_tile(rows, hidden // UNIT_ROWS, rounds, num_sms, may_split=True)
        assert tile is None or tile.splits * rows * hidden <= len(sums)
