"""How the experts' products are cut: what the table says of a measured model, what other shapes and cards get of that,
and that nothing is chosen that does not fit."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from tests.backends.cuda.tables import H200

from twostroke.backends.cuda.kernels.expert_tiles import (
    MAX_PACKED_EXPERTS,
    FewTile,
    GroupedExperts,
    GroupedTile,
    HopperExperts,
    HopperTile,
    PackedExperts,
    UnitExperts,
    UnpackedExperts,
)
from twostroke.backends.cuda.kernels.packed_format import MX_UNITS
from twostroke.backends.cuda.kernels.packed_tiles import PACKED_SHARED_BYTES, PackedTile
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.product_kernels import EXPERTS, kernels_for
from twostroke.backends.cuda.kernels.target import Target
from twostroke.backends.cuda.tuned_table import Choices, Table, table_for

A100 = replace(H200, name="NVIDIA A100", num_sms=108, has_hopper_kernels=False)
QWEN = (Product("gated", 768, 2048, experts=128), Product("join", 2048, 768, experts=128))
MIXTRAL = (Product("gated", 14336, 4096, experts=8), Product("join", 4096, 14336, experts=8))
ODD = (Product("gated", 72, 1000, experts=8), Product("join", 1000, 72, experts=8))
BOTH = ("packed", "plain")
ON_H200, ON_A100 = (Choices(table_for(H200.name), card) for card in (H200, A100))


@pytest.mark.parametrize(
    "num_tokens, rows",
    [(16, 8), (64, 8), (72, 16), (128, 16), (256, 24), (272, 32), (320, 32), (448, 40), (512, 56), (640, 56)],
)
def test_a_30b_s_experts_in_twelve_bits(num_tokens: int, rows: int) -> None:
    """128 experts, 8 a token."""
    gates, downs = (ON_H200.of(product, num_tokens * 8, BOTH).tile for product in QWEN)
    assert gates == PackedTile(rows, 2, 2) and downs == PackedTile(rows, 4, 1)


@pytest.mark.parametrize("products", [QWEN, MIXTRAL])
def test_nearly_every_expert_has_one_tile_of_rows(products: tuple[Product, Product]) -> None:
    experts = products[0].experts
    assert ON_H200.last_rows(products[0], "packed") == ON_H200.last_rows(products[1], "packed") == 40 * experts
    for product in products:
        for num_rows in range(experts, 40 * experts, 7):
            tile, average = ON_H200.of(product, num_rows, BOTH).tile, num_rows / experts
            assert isinstance(tile, PackedTile)
            assert tile.rows >= average + 1.9 * sqrt(average) - 1e-9, "most experts of a random routing fit"
            assert tile.held_stages >= 3 and tile.shared_bytes <= PACKED_SHARED_BYTES and tile.stage_bytes % 1024 == 0
        assert isinstance(ON_H200.of(product, 40 * experts + 1, BOTH).tile, HopperTile)


def test_few_tokens_and_plain_weights() -> None:
    gates, downs = QWEN
    assert isinstance(ON_H200.of(gates, 4 * 8, BOTH).tile, FewTile)
    assert isinstance(ON_H200.of(MIXTRAL[0], 2, BOTH).tile, FewTile), "one token's two experts of eight"
    for num_rows, tile_rows in ((33, 16), (1537, 32), (3073, 64)):
        for product in QWEN:
            tile = ON_H200.of(product, num_rows, ("plain",)).tile
            assert isinstance(tile, GroupedTile) and tile.rows == tile_rows
    assert ON_H200.of(gates, 8192 * 8, BOTH).tile == HopperTile(128, 128, 4)
    assert ON_H200.of(downs, 8192 * 8, BOTH).tile == HopperTile(128, 256, 4, rows_in_bulk=True, pieces=2)


@pytest.mark.parametrize("product", [*QWEN, *MIXTRAL, *ODD])
def test_another_card_has_what_it_can_run(product: Product) -> None:
    for num_rows in (1, *range(2, 600 * product.experts, 97)):
        tile = ON_A100.of(product, num_rows, BOTH).tile
        assert isinstance(tile, FewTile) or (isinstance(tile, GroupedTile) and tile.rows <= 64)
    empty = Choices(Table("none", {}), H200)
    assert isinstance(empty.of(product, 10, BOTH).tile, GroupedTile), "a rule where there is no table"


@pytest.mark.parametrize("product", [*QWEN, *ODD])
@pytest.mark.parametrize(("card", "most_rows"), [(H200, 128), (A100, 64)])
def test_the_rule_takes_larger_tiles_for_more_rows_and_fits(product: Product, card, most_rows: int) -> None:
    """Shared memory of Hopper, of Ampere, and of the least; also in float32, where a stage is twice as large."""
    kernel, seen = GroupedExperts(), []
    for average in (0.1, 8, 16, 32, 128, 512, 10_000):
        tile = kernel.tile(product, max(1, int(average * product.experts)), card, {})
        assert isinstance(tile, GroupedTile)
        seen.append(tile.rows)
        for shared_bytes, element_size in ((227 << 10, 2), (163 << 10, 2), (99 << 10, 4)):
            stage_bytes = tile.stage_bytes(gated=product.is_gated, element_size=element_size)
            num_stages = Target(False, (9, 0), 132, shared_bytes).stages(tile.num_stages, stage_bytes)
            matrix_rows = tile.rows + tile.outputs * (2 if product.is_gated else 1)
            assert 1 <= num_stages <= tile.num_stages
            assert num_stages * matrix_rows * tile.depth * element_size < shared_bytes
    assert seen == [min(rows, most_rows) for rows in (16, 16, 32, 64, 128, 128, 128)]


@pytest.mark.parametrize("product", [*QWEN, *MIXTRAL, *ODD])
def test_candidates_are_accepted_or_declined_with_a_reason(product: Product) -> None:
    assert kernels_for(product) == EXPERTS
    taken = set()
    for num_rows in (1, 8, 4 * product.experts, 30 * product.experts, 500 * product.experts):
        for kernel in EXPERTS:
            for settings in kernel.candidates(product, num_rows, H200):
                tile = kernel.tile(product, num_rows, H200, settings)
                assert not isinstance(tile, str) or len(tile) > 10
                taken |= {kernel.name} if not isinstance(tile, str) else set()
    assert "grouped_experts" in taken
    assert product in ODD or {"packed_experts", "hopper_experts"} <= taken


def test_what_they_do_not_take() -> None:
    dense, hopper, packed = Product("gated", 768, 2048), HopperExperts(), PackedExperts()
    settings = {"rows": 128, "outputs": 128, "stages": 4}
    for kernel in EXPERTS:
        assert "experts" in str(kernel.tile(dense, 8, H200, settings))
    assert "Hopper" in str(hopper.tile(QWEN[0], 8, A100, settings))
    assert "multiples" in str(hopper.tile(Product("gated", 72, 2048, experts=8), 8, H200, settings))
    assert "too many" in str(HopperTile(128, 256, 6).unfit(2048, 2048, gated=False))
    assert "rounds" in str(HopperTile(64, 64, 5).unfit(256, 64, gated=True))
    assert hopper.tile(Product("join", 256, 128, experts=8), 8, H200, settings) == HopperTile(128, 128, 2)
    tile = {"rows": 8, "groups": 2, "units": 2}
    assert "at most" in str(packed.tile(replace(QWEN[0], experts=MAX_PACKED_EXPERTS + 1), 8, H200, tile))
    assert "packed form" in str(packed.tile(Product("join", 512, 704, experts=8), 8, H200, tile)), (
        "an odd number of rounds"
    )
    assert "fit" in str(packed.tile(QWEN[0], 8, H200, {"rows": 128, "groups": 2, "units": 2}))


@pytest.mark.parametrize("product", [Product("gated", 2880, 2880, True, 32), Product("join", 2048, 768, experts=128)])
def test_experts_in_units_have_a_tile_for_any_number_of_rows(product: Product) -> None:
    """Which changes only where it is said to: kernels are compiled at start for those numbers of rows."""
    kernel, unpacked = UnitExperts(MX_UNITS), UnpackedExperts(MX_UNITS)
    beginnings, before = {1, *UnitExperts.beginnings(product, H200)}, None
    for rows in (*range(1, 2000), *range(2000, 400 * product.experts, 997)):
        tile = kernel.tile(product, rows, H200, {})
        if isinstance(tile, str):
            assert rows > 256 * product.experts and not isinstance(unpacked.tile(product, rows, H200, {}), str)
        elif rows <= 2000:
            assert tile == before or rows in beginnings
            before = tile
            average = rows / product.experts
            assert tile.rows >= min(average, 64) and tile.held_stages >= 2
    assert isinstance(kernel.tile(product, 1, A100, {}), str)
