"""How products with packed weights are cut: what holds for every tile that is measured or taken."""

from __future__ import annotations

from itertools import product

import pytest
from tests.backends.cuda.packed_case import held_rows
from tests.backends.cuda.tables import H200

from twostroke.backends.cuda.kernels.packed_format import DEPTH, UNIT_ROWS
from twostroke.backends.cuda.kernels.packed_tiles import (
    DENSE_ROWS,
    MAX_DENSE_ROWS,
    MAX_STAGES,
    MOST_SUMS,
    OWN_BYTES,
    SHARED_BYTES,
    WHOLE_ROUND_ROWS,
    PackedProducts,
    PackedTile,
)
from twostroke.backends.cuda.kernels.product import MAX_PART_ROWS, Card, Product, Role

KERNEL = PackedProducts()
SHAPES = [(units * UNIT_ROWS, rounds * DEPTH) for units in (16, 64, 96, 224, 448, 2004) for rounds in (16, 64, 80, 224)]


@pytest.mark.parametrize("num_sms", [78, 114, 132, 144])
@pytest.mark.parametrize("role", ["plain", "gated", "join", "head"])
def test_every_candidate_fits_the_chip_and_covers_the_product(role: Role, num_sms: int) -> None:
    num_found, card = 0, Card("a card", num_sms, has_hopper_kernels=True)
    for rows, (outputs, width) in product((1, 9, 17, 50, 64, 65, *DENSE_ROWS), SHAPES):
        asked = Product(role, outputs, width)
        for settings in KERNEL.candidates(asked, rows, card):
            tile = KERNEL.tile(asked, rows, card, settings)
            assert isinstance(tile, PackedTile)
            num_found += 1
            assert rows <= tile.rows == held_rows(rows) <= max(8, 2 * rows - 2)
            assert 3 <= tile.held_stages <= MAX_STAGES and tile.shared_bytes <= tile.most_shared_bytes
            assert (tile.most_shared_bytes + OWN_BYTES) * tile.at_once <= SHARED_BYTES
            assert tile.stage_bytes % 1024 == 0  # where the copy engine's swizzle begins
            assert tile.units * tile.rows <= MOST_SUMS[tile.groups]  # of two threads
            assert tile.splits == 1 or (role == "join" and tile.splits * rows <= MAX_PART_ROWS)
            rounds_of_group, left = divmod(width // DEPTH // tile.splits, tile.groups if tile.shared else 1)
            assert left == 0 and (rounds_of_group % 2 == 0 or tile.rows > WHOLE_ROUND_ROWS)
            if tile.shared:
                assert role != "gated" and tile.programs(asked) <= num_sms * tile.at_once
                # A group comes back to the same stages, and frees one when it has begun to multiply from the next.
                assert tile.held_stages % tile.groups == 0 and tile.held_stages >= 2 * tile.groups
                ring_bytes = tile.held_stages * tile.stage_bytes
                assert (
                    tile.groups * tile.units * tile.rows // 8 * 128 * 16 <= ring_bytes
                )  # sums that groups add up there
            if tile.splits > 1:
                assert tile.programs(asked) <= num_sms * tile.at_once  # in one wave
    assert num_found > 100


@pytest.mark.parametrize(
    "asked, rows, settings, reason",
    [
        (Product("join", 4096, 4096), MAX_DENSE_ROWS + 1, {}, "256 rows at most"),
        (Product("gated", 4096, 4096, experts=8), 8, {}, "of one matrix"),
        (Product("gated", 4096, 4032), 8, {}, "no packed form"),
        (Product("plain", 4096, 4096, has_bias=True), 8, {}, "adds no bias"),
        (Product("join", 4096, 4096 + 128), 8, {"splits": 4}, "uneven"),
        (Product("plain", 4096, 4096), 8, {"splits": 2}, "nobody adds up"),
        (Product("join", 4096, 8192), 256, {"splits": 16}, "too many"),
        (Product("gated", 4096, 4096), 8, {"shared": True}, "no gate"),
        (Product("plain", 8512, 4096), 8, {"shared": True}, "one tile each"),
        (Product("plain", 4096, 4096), 224, {"units": 2}, "does not fit"),
        (Product("plain", 4096, 4096), 8, {"units": 2, "at_once": 2}, "two programs at once"),
        (Product("plain", 4096, 4096), 33, {"at_once": 2}, "two programs at once"),
        (Product("plain", 4096, 4096), 8, {"at_once": 3}, "two programs at once"),
    ],
)
def test_what_it_does_not_take_is_declined_with_a_reason(
    asked: Product, rows: int, settings: dict[str, int], reason: str
) -> None:
    assert reason in str(KERNEL.tile(asked, rows, H200, {"groups": 2} | settings))
    other = Card("another", 108, has_hopper_kernels=False)
    assert isinstance(KERNEL.tile(asked, rows, other, {"groups": 2}), str)
    assert not KERNEL.candidates(asked, rows, other)
