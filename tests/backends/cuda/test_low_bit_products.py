"""Products with weights in eight and four bits: the kernel of few rows in an emulation of its own text (and that it
compiles), the others, and who is chosen, each against float32 over the weights as they are held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.backends.cuda.packed_case import HAS_HOPPER, activated, assert_near, by_kernel, needs_compiler
from tests.backends.cuda.tables import H200
from tests.backends.cuda.test_packed_products import assert_compiles_well, needs_nvrtc
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import product_launches
from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.eight_bits import E4M3
from twostroke.backends.cuda.kernels.packed_format import FOUR_BITS, FP8, INT4, LOW_BIT_CODES, Code
from twostroke.backends.cuda.kernels.packed_products import product_kernel
from twostroke.backends.cuda.kernels.packed_tiles import DENSE_ROWS, PackedTile
from twostroke.backends.cuda.kernels.product import Card, Product
from twostroke.backends.cuda.kernels.product_kernels import FLOAT8_BY_RULE, KERNELS
from twostroke.backends.cuda.matrix import LowBitMatrix, Matrix, empty_low_bit
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.stored_codes import all_held_in
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Table, TableLine
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensor import WeightKind

BF16, F32 = torch.bfloat16, torch.float32
HOPPER = Card("a test's", 132, has_hopper_kernels=True, has_float8=True)
OLD = Card("a test's", 84, has_hopper_kernels=False)
OFFSETS_32 = FOUR_BITS[-1]


def held(product: Product, code: Code, device: str) -> LowBitMatrix:
    """At random, with every number that the code has."""
    rows, width = product.shape
    form = empty_low_bit(product, code, torch.device(device))
    weight = torch.randn(rows, width, device=device) * width**-0.5
    if not code.has_offsets:
        form.quantise(weight.to(BF16))
        return form
    groups = -(-width // code.group)
    numbers = torch.randint(0, 16, (rows, width), dtype=torch.uint8, device=device)
    scales = torch.rand(rows, groups, device=device) * 0.02
    form.put(numbers, scales, -7.5 * scales)  # type: ignore[call-arg, arg-type]
    return form


@needs_compiler
@pytest.mark.parametrize(
    "tile, outputs, width, kind, dtype, rows",
    [
        (PackedTile(8, 2, stages=3, code=FP8), 520, 512, None, BF16, 7),  # the ring runs on from tile to tile
        pytest.param(
            PackedTile(8, 2, stages=4, splits=2, shared=True, code=FP8), 72, 1024, None, F32, 8, marks=pytest.mark.slow
        ),
        (PackedTile(16, 2, code=FP8, at_once=2), 520, 512, None, BF16, 9),
        (PackedTile(16, 4, code=FP8), 200, 576, "silu", BF16, 9),  # a round that is half of inputs that are not there
        pytest.param(PackedTile(96, 2, 2, code=FP8), 136, 256, "gelu_tanh", BF16, 81, marks=pytest.mark.slow),
        pytest.param(PackedTile(176, 2, code=FP8), 136, 256, None, F32, 161, marks=pytest.mark.slow),
        pytest.param(PackedTile(8, 2, stages=3, code=INT4), 520, 512, None, BF16, 7, marks=pytest.mark.slow),
        (PackedTile(64, 2, stages=4, splits=2, shared=True, code=INT4), 72, 1024, None, F32, 33),
        pytest.param(PackedTile(16, 4, code=INT4), 200, 576, "silu", BF16, 9, marks=pytest.mark.slow),
        (PackedTile(8, 2, code=OFFSETS_32), 200, 384, "silu", BF16, 3),
        pytest.param(PackedTile(96, 2, 2, code=OFFSETS_32), 136, 256, None, BF16, 81, marks=pytest.mark.slow),
        pytest.param(PackedTile(8, 2, code=FOUR_BITS[2]), 136, 384, None, BF16, 5, marks=pytest.mark.slow),
        pytest.param(PackedTile(208, 2, code=INT4), 136, 256, None, F32, 193, marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{value.code.name}-{value.rows}-{value.groups}" if isinstance(value, PackedTile) else None,
)
def test_few_rows_on_an_emulated_device(
    tile: PackedTile, outputs: int, width: int, kind: Activation | None, dtype: torch.dtype, rows: int, device: str
) -> None:
    torch.manual_seed(outputs)
    multiply, _ = by_kernel("cuda" if HAS_HOPPER else "cpu")
    device = "cuda" if HAS_HOPPER else "cpu"
    form = held(Product("gated" if kind else "plain", outputs, width), tile.code, device)
    buffer = torch.randn(tile.rows + 8, width, device=device).to(BF16)
    buffer[rows:] = float("nan")  # what lies behind the rows must not matter
    x = buffer[:rows]
    shape = (rows, outputs) if tile.splits == 1 else (tile.splits, rows, outputs)
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    multiply(x, form, out, tile=tile, num_sms=132 if tile.shared or HAS_HOPPER else 2, gated=kind)
    expected = activated(x.float() @ form.dequantised().T, kind)
    assert_near(out if tile.splits == 1 else out.sum(0), expected, dtype)


@needs_nvrtc
@pytest.mark.parametrize("code", [FP8, INT4, OFFSETS_32], ids=lambda code: code.name)
def test_it_compiles_to_products_that_nothing_holds_up(
    code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    for tile, gated, is_float32 in (
        (PackedTile(8, 2, code=code), "silu", False),
        (PackedTile(32, 2, code=code, at_once=2), None, True),
        (PackedTile(64, 4, code=code), None, True),
        (PackedTile(128, 2, 2, code=code), "silu", False),
    ):
        assert_compiles_well(product_kernel(tile, gated, is_float32), tile, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", LOW_BIT_CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("card", [HOPPER, H200, OLD], ids=["Hopper", "no float8", "old"])
def test_somebody_computes_any_product(code: Code, card: Card) -> None:
    """With no line in any table: few rows by the kernel that reads least, and all else by what any card has."""
    choices = Choices(Table("empty", {}), card)
    for role, outputs, width, bias in (
        ("gated", 14336, 4096, False),
        ("join", 4096, 14336, False),
        ("sandwich", 2560, 2560, False),
        ("plain", 1152, 576, True),
        ("plain", 100, 96, False),
    ):
        asked = Product(role, outputs, width, bias)  # type: ignore[arg-type]
        for rows in (1, 8, 64, 65, 256, 257, 8192):
            choice = choices.of(asked, rows, (code.name,))
            assert choice.kernel.form == code.name
            most = FLOAT8_BY_RULE if code is FP8 else DENSE_ROWS[-1]
            is_few = rows <= most and width % 64 == 0 and outputs % 8 == 0 and card.has_hopper_kernels
            if is_few:
                assert isinstance(choice.tile, PackedTile) and choice.tile.rows >= rows, choice.tile
                assert choice.tile.fault(asked, rows, card.num_sms) is None
            elif code is FP8 and card.has_float8 and outputs % 16 == 0:
                assert choice.kernel.name == "scaled"
            else:
                assert choice.kernel.name == f"{code.name}_unpacked"


def test_a_table_goes_before_the_rule() -> None:
    asked = Product("join", 4096, 4096)
    lines = (TableLine(1, 128, "fp8", {"groups": 4, "splits": 4}), TableLine(129, NO_END, "scaled"))
    choices = Choices(Table("a test", {asked: {"fp8": lines}}), HOPPER)
    assert choices.of(asked, 100, ("fp8",)).tile == PackedTile(112, 4, splits=4, code=FP8)
    assert choices.of(asked, 129, ("fp8",)).kernel.name == "scaled"
    assert choices.of(asked, 1, ("plain",)).kernel.name == "cublas", "another form has no line there"


@pytest.mark.parametrize("code", LOW_BIT_CODES, ids=lambda code: code.name)
def test_candidates_are_tiles_that_are_taken(code: Code) -> None:
    kernel = KERNELS[code.name]
    for asked in (Product("gated", 14336, 4096), Product("join", 4096, 14336), Product("plain", 6144, 4096)):
        for rows in (1, 64, 128):
            found = kernel.candidates(asked, rows, HOPPER)
            assert found and all(isinstance(kernel.tile(asked, rows, HOPPER, one), PackedTile) for one in found)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    made = make_tiny("llama", tmp_path, hidden_size=192, intermediate_size=320)[0]
    return random_checkpoint(made, WeightKind.BF16).spec


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "code, kernel",
    [
        (FP8, "scaled"),
        (FP8, "fp8_unpacked"),
        (INT4, "int4_128_unpacked"),
        pytest.param(INT4, "int4_128", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_layer_s_products(
    code: Code, kernel: str, has_bias: bool, spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain, gated and joined to the residual stream, with a bias or not."""
    if kernel == code.name:
        multiply, _ = by_kernel(device)
        monkeypatch.setattr(product_launches, "packed_product", multiply)
    torch.manual_seed(0)
    hidden, inner, rows = spec.hidden_size, spec.dense_width, 5
    scratch = ProductScratch(spec, 8, BF16, torch.device(device), all_held_in(code))
    x = torch.randn(rows, hidden, device=device).to(BF16)
    norm = torch.ones(hidden, dtype=BF16, device=device)

    def seen(rows: torch.Tensor) -> torch.Tensor:
        """As they are multiplied."""
        if kernel != "scaled":
            return rows.float()
        scales = rows.float().abs().amax(1, keepdim=True) / 448.0
        return (rows.float() / scales).to(E4M3).float() * scales

    def ours(asked: Product) -> Products:
        settings = {"groups": 2} if kernel == code.name else {}
        line = TableLine(1, NO_END, kernel, settings)
        return Products(spec, scratch, Choices(Table("a test", {asked: {code.name: (line,)}}), HOPPER))

    for asked in (Product("plain", 2 * hidden, hidden, has_bias), Product("gated", inner, hidden)):
        form = held(asked, code, device)
        bias = torch.randn(asked.shape[0], device=device).to(BF16) if asked.has_bias else None
        out = torch.full((rows, asked.outputs), float("nan"), dtype=BF16, device=device)
        matrix = Matrix("m", asked, {code.name: form}, bias)
        ours(asked).multiply(Stream(x, x, normed_by=norm), norm, matrix, out)
        sums = seen(x) @ form.dequantised().T + (0.0 if bias is None else bias.float())
        assert_near(out, activated(sums, "silu" if asked.is_gated else None), BF16, roundings=2)
    asked = Product("join", hidden, inner, has_bias)
    form, bias = held(asked, code, device), torch.randn(hidden, device=device).to(BF16) if has_bias else None
    given, residual = (torch.randn(rows, width, device=device).to(BF16) for width in (inner, hidden))
    expected = residual.float() + seen(given) @ form.dequantised().T + (0.0 if bias is None else bias.float())
    stream = Stream(residual, torch.empty_like(residual))
    ours(asked).join(given, Matrix("m", asked, {code.name: form}, bias), stream, None, norm)
    assert_near(residual, expected, BF16, roundings=2)
