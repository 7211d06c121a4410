"""The package's lines for products in float8: whom they serve, how far they reach, and what a start says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.tables import H200
from tests.models.quantised.folders import make_quantised

from twostroke.backends.cuda import FACTORY, device_here
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, GROUPED_CODES, INT4, Code
from twostroke.backends.cuda.kernels.product import Card, Product
from twostroke.backends.cuda.kernels.target import Target
from twostroke.backends.cuda.layer_matrices import matrices_of
from twostroke.backends.cuda.tuned_table import NO_END, Choices, TableLine, keep
from twostroke.core.formats import Formats, FormatWish
from twostroke.engine.meant_formats import otherwise
from twostroke.models.loading import load_checkpoint

BLOCKS, BLOCKS_OF_32 = (next(code for code in GROUPED_CODES if code.name == name) for name in ("fp8_128", "fp8_32"))
TILE = {"rows": 64, "outputs": 64, "num_warps": 4, "num_stages": 4}
ABLE = replace(H200, has_float8=True)
MEASURED = {
    Product("plain", 6144, 4096): 513,
    Product("join", 4096, 4096): 257,
    Product("gated", 14336, 4096): 257,
    Product("join", 4096, 14336): 257,
}
"""With the first number of rows that float8 is faster for."""
LAST = 8192


def by(card: Card, product: Product, rows: int, code: Code) -> str:
    return Choices.on(card).of(product, rows, (in_float8(code), code.name)).kernel.name


@pytest.mark.parametrize("code", [BLOCKS, INT4], ids=lambda code: code.name)
@pytest.mark.parametrize("product", MEASURED, ids=lambda product: f"{product.role} {product.outputs}")
def test_the_library_multiplies_where_it_was_measured_to_be_faster(product: Product, code: Code) -> None:
    first, library = MEASURED[product], f"{code.name}_float8_library"
    assert all(by(ABLE, product, rows, code) == library for rows in (first, 1024, 2048, LAST))
    assert all(by(ABLE, product, rows, code) == f"{code.name}_unpacked" for rows in (LAST + 1, 65536))
    assert by(ABLE, product, 8, code) == code.name and "float8" not in by(ABLE, product, first - 1, code)


def test_rows_that_nobody_asked_to_round_are_not_by_what_another_size_gained() -> None:
    for product in (Product("gated", 12288, 4096), Product("join", 1024, 2048), Product("plain", 10240, 8192)):
        assert by(ABLE, product, 4096, BLOCKS) == "fp8_128_unpacked"
        assert by(replace(ABLE, prefers_float8=True), product, 4096, BLOCKS) == "fp8_128_float8_library"


@pytest.mark.parametrize("product", [Product("gated", 768, 2048, experts=128), Product("join", 2048, 768, experts=128)])
def test_experts_stay_in_bf16(product: Product) -> None:
    """In units, as long as that kernel takes them: beyond 16,384 rows nothing was measured beside it."""
    for rows in (64, 8192, 16384, 16385, 20000, 32768):
        assert by(ABLE, product, rows, FP8_UNITS) == "fp8_units_experts"
    assert by(ABLE, product, 32769, FP8_UNITS) == by(ABLE, product, 65536, FP8_UNITS) == "fp8_units_unpacked_experts"


@pytest.mark.parametrize(
    "card",
    [
        replace(ABLE, lacks_group_scales=True),
        Card("NVIDIA L40S", 142, has_hopper_kernels=False, has_float8=True),
        Card("NVIDIA B200", 148, has_hopper_kernels=False, has_float8=True),
    ],
    ids=["CUDA 12.8", "L40S", "B200"],
)
def test_without_the_librarys_products_who_asks_gets_the_others(card: Card) -> None:
    """They were measured to be slower than a library that is not here."""
    for product in MEASURED:
        assert by(card, product, 4096, BLOCKS) == "fp8_128_unpacked"
        assert by(replace(card, prefers_float8=True), product, 4096, BLOCKS) == "fp8_128_float8"


@pytest.mark.parametrize(("version", "lacks"), [("12.6", True), ("12.8", True), ("12.9", False), ("13.0", False)])
def test_which_torch_has_them(version: str, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert Target(interpreted=False, capability=(9, 0), num_sms=132).lacks_group_scales == lacks
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not Target(interpreted=True, capability=(0, 0), num_sms=1).lacks_group_scales


def test_a_start_says_which_prompts_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the card's table, of a folder that means inputs in float8; and that a word keeps bf16."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device_here, "card_here", lambda: ABLE)
    monkeypatch.setattr(device_here, "lacks_float8", lambda: False)
    checkpoint = load_checkpoint(make_quantised("fp8_block", tmp_path / "model")[0])

    def chosen(*wish: str | None) -> Formats:
        found = FACTORY.formats(checkpoint, FormatWish(*wish))
        assert isinstance(found, Formats), found
        return found

    unmeasured = chosen()
    assert unmeasured.inputs_in_float8 is None and "the table for" not in unmeasured.line
    assert "which stay in bf16" in otherwise(checkpoint, unmeasured)[0]
    matrices = [one for one in matrices_of(checkpoint.spec) if one.kind != "head"]
    rounded = {one.product for one in matrices if one.kind == "down"}
    line = TableLine(257, NO_END, f"{BLOCKS_OF_32.name}_float8", TILE)
    keep(ABLE.name, {product: {in_float8(BLOCKS_OF_32): (line,)} for product in rounded})
    count = sum(one.product in rounded for one in matrices)
    found = chosen()
    assert found.arithmetic == "bf16" and found.inputs_in_float8 is True
    assert f"prompts meet {count} of {len(matrices)} matrices in float8, where the table for NVIDIA H200" in found.line
    assert 0 < count < len(matrices)
    assert "of which some stay in bf16 unless --dtype fp8" in otherwise(checkpoint, found)[0]
    asked = chosen(None, "bf16")
    assert asked.inputs_in_float8 is False and "float8" not in asked.line
    monkeypatch.setattr(device_here, "card_here", lambda: replace(ABLE, has_float8=False))
    assert chosen() == unmeasured
