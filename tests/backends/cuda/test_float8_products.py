"""Products in float8 of weights in few bits: weights come to float8 without an error, rows to the nearest, and sums are
those of float64 over what was multiplied; of one matrix and of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.backends.cuda.packed_case import activated, assert_near

from twostroke.backends.cuda.kernels import float8_products
from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.eight_bits import E4M3, LARGEST
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.float8_products import (
    Float8Rows,
    Float8Weights,
    float8_matmul,
    library_matmul,
)
from twostroke.backends.cuda.kernels.float8_room import RowRoom, padded_width, weights_in_float8
from twostroke.backends.cuda.kernels.float8_tiles import (
    DENSE_FLOAT8,
    ROWS_FLOAT8,
    UNITS_FLOAT8,
    Float8Tile,
    float8_bytes,
)
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, GroupValues
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, GROUPED_CODES, INT4, Code
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import LowBitMatrix, empty_low_bit

BF16 = torch.bfloat16
BLOCKS = next(code for code in GROUPED_CODES if code.name == "fp8_128")
GROUPS_OF_32 = next(code for code in GROUPED_CODES if code.name == "fp8_32")
AWQ = next(code for code in GROUPED_CODES if code.name == "int4_128hz")
SMALL = Float8Tile(16, 16, 4, 2)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not target_of("cuda").has_float8, reason="needs a card that multiplies float8"
)


def drawn(product: Product, code: Code, device: str) -> LowBitMatrix:
    torch.manual_seed(product.width)
    form = empty_low_bit(product, code, torch.device(device))
    if isinstance(form, FourBitMatrix):
        form.quantise(torch.randn(product.shape, device=device))
        return form
    assert isinstance(form, GroupedMatrix | ExpertUnits | ExpertMatrix)
    form.draw()
    for matrix in (form,) if isinstance(form, GroupedMatrix) else form if isinstance(form, ExpertUnits) else ():
        if isinstance(matrix, GroupedMatrix):  # with scales that differ, and zeros
            rows, groups = matrix.rows, -(-matrix.width // code.group)
            numbers = torch.randint(0, 16, (rows, matrix.width), dtype=torch.uint8, device=device)
            if matrix.grouping.is_float8:
                numbers = torch.randn(rows, matrix.width, device=device).to(E4M3).view(torch.uint8)
            offsets = torch.randint(0, 16, (rows, groups), device=device)
            scales = torch.rand(rows, groups, device=device).to(torch.float16)
            matrix.put(numbers, GroupValues(scales, None if matrix.grouping.offset == "none" else offsets))
    return form


def brought(form: LowBitMatrix) -> Float8Weights:
    assert isinstance(form, FourBitMatrix | GroupedMatrix | ExpertUnits | ExpertMatrix)
    shape = tuple(form.dequantised().shape)
    room = torch.full((max(8, float8_bytes(shape, form.code)),), 127, dtype=torch.uint8, device=form.data.device)
    return weights_in_float8(form, room)


def spread(weights: Float8Weights) -> torch.Tensor:
    """float64 [matrices, rows, width], which may be padded"""
    levels, each = weights.data.view(E4M3).double(), weights.group or weights.data.shape[2]
    scales = weights.scales.double().transpose(1, 2).repeat_interleave(each, 2)[..., : levels.shape[2]]
    return levels * scales


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("code", DENSE_FLOAT8, ids=lambda code: code.name)
def test_weights_come_to_float8_without_an_error(code: Code, is_gated: bool, device: str) -> None:
    """A width that is no whole number of rounds leaves zeros behind it, which rows' own zeros meet."""
    form = drawn(Product("gated" if is_gated else "plain", 40, 160), code, device)
    found = spread(brought(form))
    assert found.shape == (1, 80 if is_gated else 40, 256) and not found[..., 160:].any()
    assert torch.equal(found[0, :, :160].float().to(BF16).float(), form.dequantised())


@pytest.mark.parametrize("code", [*UNITS_FLOAT8[:3], BLOCKS, AWQ, *ROWS_FLOAT8], ids=lambda code: code.name)
def test_weights_of_experts_too(code: Code, device: str) -> None:
    form = drawn(Product("gated", 40, 160, experts=3), code, device)
    found = spread(brought(form))[..., :160]
    assert torch.equal(found.float().to(BF16), form.dequantised().to(BF16))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What rows are multiplied as  # float64"""
    missing = padded_width(x.shape[1]) - x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, missing)).unflatten(1, (-1, 128))
    scales = torch.clamp(groups.abs().amax(2, keepdim=True) / LARGEST, min=2.0**-100)
    return ((groups / scales).to(E4M3).double() * scales.double()).flatten(1)[:, : x.shape[1]]


def room_for(x: torch.Tensor) -> RowRoom:
    return RowRoom(len(x) * padded_width(x.shape[1]), x.device)


def test_rows_are_rounded_by_groups(device: str) -> None:
    x = torch.randn(5, 300, device=device).to(BF16)
    x[1], x[2, :128] = 0, 300.0  # a row of zeros; a group far larger than the others of its row
    rows = room_for(x).rounded(x)
    found = rows.data.view(E4M3).double().unflatten(1, (-1, 128)) * rows.scales.double().t()[..., None]
    assert torch.allclose(found.flatten(1)[:, :300], rounded(x), rtol=1e-6, atol=0)
    error = (rounded(x) - x.double()).abs().unflatten(1, (-1, 100))
    assert float(error.max()) <= 300 / 16 and float(error[0].max()) < 0.2
    assert not rows.data[:, 300:].any()


@pytest.mark.parametrize("in_bulk", [True, False])
@pytest.mark.parametrize(
    "code, tile, rows, outputs, width, kind, has_bias",
    [
        (BLOCKS, SMALL, 37, 40, 256, None, False),
        (BLOCKS, Float8Tile(32, 16, 4, 2), 300, 24, 160, None, True),  # blocks of rows in turns of eight
        (GROUPS_OF_32, SMALL, 20, 40, 192, "silu", False),
        (INT4, SMALL, 5, 24, 320, "silu", True),
        (AWQ, Float8Tile(16, 32, 4, 3), 33, 40, 256, None, False),
    ],
    ids=lambda value: value.name if isinstance(value, Code) else None,
)
def test_a_product_of_one_matrix(
    code: Code, tile: Float8Tile, rows: int, outputs: int, width: int, kind: Activation | None, has_bias: bool,
    in_bulk: bool, device: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not in_bulk:
        monkeypatch.setattr(float8_products, "can_copy_in_bulk", lambda matrix: False)
    form = drawn(Product("gated" if kind else "plain", outputs, width), code, device)
    x = (torch.randn(rows, width, device=device) * torch.rand(rows, 1, device=device)).to(BF16)
    weights = brought(form)
    bias = torch.randn(weights.data.shape[1], device=device).to(BF16) if has_bias else None
    guard = torch.full((rows + 1, outputs), float("nan"), dtype=BF16, device=device)
    float8_matmul(room_for(x).rounded(x), weights, guard[:rows], tile=tile, bias=bias, gated=kind)
    exact = rounded(x) @ spread(weights)[0, :, :width].t() + (0.0 if bias is None else bias.double())
    assert_near(guard[:rows], activated(exact.float(), kind), BF16)
    assert guard[rows:].isnan().all(), "written behind the last row"
    near = x.double() @ form.dequantised().double().t() + (0.0 if bias is None else bias.double())
    near = activated(near.float(), kind)
    assert float((guard[:rows].float() - near).norm() / near.norm()) < 0.05


def test_small_numbers_are_not_lost_beside_large_ones(device: str) -> None:
    """Groups of a row have scales of their own, and sums of groups are float32's: 2^16 and 2^-4 differ by more than one
    scale's float8 or 14 bits of a sum hold."""
    form = GroupedMatrix.empty((16, 256), BLOCKS, device)
    ones = torch.ones(16, 256, device=device).to(E4M3).view(torch.uint8)
    form.put(ones, GroupValues(torch.ones(16, 2, device=device)))
    x = torch.zeros(16, 256, device=device)
    x[:, 0], x[:, 128] = 2.0**16, 2.0**-4
    out = torch.empty(16, 16, device=device)
    float8_matmul(room_for(x).rounded(x), brought(form), out, tile=SMALL)
    assert torch.equal(out, torch.full_like(out, 2.0**16 + 2.0**-4))


@pytest.mark.parametrize(
    "code, counts, kind, outputs, width, has_bias",
    [
        (FP8_UNITS, [0, 7, 40, 1], "silu", 24, 256, False),
        (FP8_UNITS, [3, 0, 21, 0], None, 40, 160, False),
        (BLOCKS, [19, 0, 0, 5], "silu", 24, 160, True),
        (INT4, [2, 18, 1, 0], None, 40, 256, False),
        (ROWS_FLOAT8[0], [9, 0, 17, 2], "silu", 24, 160, False),
        (ROWS_FLOAT8[1], [9, 0, 17, 2], None, 24, 272, True),
    ],
    ids=lambda value: value.name if isinstance(value, Code) else None,
)
def test_a_product_of_experts(
    code: Code, counts: list[int], kind: Activation | None, outputs: int, width: int, has_bias: bool, device: str
) -> None:
    product = Product("gated" if kind else "join", outputs, width, experts=len(counts))
    form, top_k, num_pairs = drawn(product, code, device), 3, sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
    pairs = torch.randperm(-(-num_pairs // top_k) * top_k)[:num_pairs].to(torch.int32).to(device)
    x = torch.randn(-(-num_pairs // top_k) if kind else num_pairs, width, device=device).to(BF16)
    weights = brought(form)
    bias = torch.randn(weights.data.shape[:2], device=device).to(BF16) if has_bias else None
    guard = torch.full((num_pairs + 1, outputs), float("nan"), dtype=BF16, device=device)
    float8_matmul(
        room_for(x).rounded(x), weights, guard[:num_pairs], tile=SMALL, order=Order(pairs, starts, top_k),
        gathers=kind is not None, bias=bias, gated=kind,
    )  # fmt: skip
    sources = rounded(x)[pairs.long() // top_k] if kind else rounded(x)
    sums = [part @ own.t() for part, own in zip(sources.split(counts), spread(weights)[..., :width], strict=True)]
    if bias is not None:
        sums = [part + own.double() for part, own in zip(sums, bias, strict=True)]
    assert_near(guard[:num_pairs], activated(torch.cat(sums).float(), kind), BF16)
    assert guard[num_pairs].isnan().all(), "written behind the last row"


@pytest.mark.parametrize("in_bulk", [True, False])
@pytest.mark.parametrize("code", [code for code in ROWS_FLOAT8 if code.by_rows.group in (32, 64)], ids=lambda c: c.name)
def test_nothing_is_read_behind_the_last_scale(
    code: Code, in_bulk: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are padded to whole groups of 128, and scales of experts' rows are not: behind the last lies another's."""
    if not in_bulk:
        monkeypatch.setattr(float8_products, "can_copy_in_bulk", lambda matrix: False)
    form = drawn(Product("join", 24, 160, experts=2), code, device)
    assert isinstance(form, ExpertMatrix)
    memory = torch.full((form.scales.numel() + 8,), float("nan"), device=device)
    scales = memory[: form.scales.numel()].view_as(form.scales)
    form = replace(form, scales=scales.copy_(form.scales))
    starts, pairs = torch.tensor([0, 3, 20]).to(device, torch.int32), torch.arange(20).to(device, torch.int32)
    x, out = torch.randn(20, 160, device=device).to(BF16), torch.empty(20, 24, dtype=BF16, device=device)
    weights = brought(form)
    float8_matmul(room_for(x).rounded(x), weights, out, tile=SMALL, order=Order(pairs, starts, 1))
    sums = [part @ own.t() for part, own in zip(rounded(x).split([3, 17]), spread(weights), strict=True)]
    assert_near(out, torch.cat(sums).float(), BF16)


def test_the_library_says_the_same(device: str) -> None:
    if device == "cuda" and not target_of(device).is_hopper:
        pytest.skip("the library scales blocks on Hopper")
    form = drawn(Product("plain", 48, 256), BLOCKS, device)
    x = torch.randn(32, 256, device=device).to(BF16)
    rows, weights = room_for(x).rounded(x), brought(form)
    out = torch.empty(32, 48, dtype=BF16, device=device)
    library_matmul(rows, weights, out)
    assert_near(out, (rounded(x) @ spread(weights)[0].t()).float(), BF16)
    assert isinstance(rows, Float8Rows) and rows.scales.t().stride() == (1, 32), "as the library asks for scales"
