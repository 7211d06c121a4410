"""Weights in few bits as their files have them: every form holds what the `gguf` package, or a folder's own floats, say
that the file means, rounded once to bfloat16; and kernels find in it what plain torch finds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.backends.cuda.packed_case import HAS_HOPPER, activated, assert_near, by_kernel, needs_compiler
from tests.backends.cuda.test_packed_products import assert_compiles_well, needs_nvrtc
from tests.models.quantised.folders import FORMATS, make_quantised

from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, dequantise_grouped_into
from twostroke.backends.cuda.kernels.packed_format import FOUR_BITS, FP8, GROUPED_CODES, Code
from twostroke.backends.cuda.kernels.packed_products import product_kernel
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.matrix import LowBitMatrix, empty_low_bit
from twostroke.backends.cuda.stored_codes import BLOCKS, QUANTISED_TO, ROW_KINDS, code_for, order_of
from twostroke.backends.cuda.stored_numbers import fill_stored
from twostroke.core.errors import ModelError
from twostroke.models.features import KEPT_ON_CARDS, MADE_ON_CARDS
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind, WeightTensor, from_float32

BF16 = torch.bfloat16
BY_NAME = {code.name: code for code in GROUPED_CODES}


def block_bytes(kind: WeightKind, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Of every number and scale that the kind has: bytes at random, with a block's floats in a range of their own."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * width // kind.block_values, kind.block_bytes), dtype=np.uint8)
    others = {WeightKind.Q6_K: (208,), WeightKind.Q3_K: (108,), WeightKind.Q2_K: (80, 82), WeightKind.MXFP4: ()}
    floats = others.get(kind, (0, 2) if BLOCKS[kind][1].offset == "added" else (0,))
    if kind is WeightKind.MXFP4:
        data[:, 0] = rng.integers(100, 130, len(data))
    for place in floats:
        halves = (rng.standard_normal(len(data)) * 0.01).astype(np.float16)
        data[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


def drawn(kind: WeightKind, rows: int, width: int, seed: int = 0) -> WeightTensor:
    return WeightTensor("layers.0.q", kind, (rows, width), block_bytes(kind, rows, width, seed))


def meant(tensor: WeightTensor) -> torch.Tensor:
    """By llama.cpp's package."""
    kind = gguf.GGMLQuantizationType[tensor.kind.name]
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, kind).copy()).to(BF16).float()


def held(tensors: list[WeightTensor], device: str, *, is_gated: bool = False) -> LowBitMatrix:
    code, rows = code_for(tensors), sum(tensor.shape[0] for tensor in tensors)
    assert isinstance(code, Code), code
    product = (
        Product("gated", rows // 2, tensors[0].shape[1]) if is_gated else Product("plain", rows, tensors[0].shape[1])
    )
    form = empty_low_bit(product, code, torch.device(device), has_order=order_of(tensors[0]) is not None)
    fill_stored(form, tensors)
    return form


def assert_holds(form: LowBitMatrix, expected: torch.Tensor) -> None:
    """In plain torch, and by the kernel that makes bfloat16 of it for products of many rows."""
    assert torch.equal(form.dequantised().cpu(), expected)
    if isinstance(form, GroupedMatrix):
        out = torch.full((form.rows, form.width), float("nan"), dtype=BF16, device=form.data.device)
        dequantise_grouped_into(form, out)
        columns = expected if form.order is None else expected[:, form.order.cpu()]
        assert torch.equal(out.float().cpu(), columns)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if not kind.name.endswith("_PARTS")], ids=lambda k: k.name)
def test_blocks_are_held_as_they_are_stored(kind: WeightKind, is_gated: bool, device: str) -> None:
    width = 512 if kind.block_values == 256 else 352  # the last round is partly of inputs that are not there
    tensors = [drawn(kind, 72, width, seed) for seed in range(2)]
    form = held(tensors, device, is_gated=is_gated)
    assert_holds(form, torch.cat([meant(tensor) for tensor in tensors]))
    assert form.num_bytes == form.code.num_bytes((144, width))
    rounds = -(-width // 128) * 128
    held_bits = {WeightKind.Q3_K: 4.64, WeightKind.Q2_K: 5.3, WeightKind.MXFP4: 4.5}  # in four bits each
    bits = held_bits.get(kind, 8 * kind.block_bytes / kind.block_values)
    assert form.num_bytes <= 1.06 * 192 * rounds * bits / 8, "little more than the file has"


@pytest.mark.parametrize(
    "kinds, name",
    [
        (("Q4_K", "Q4_K", "Q6_K"), "int6_16ka"),  # Q4_K_M: values in more bits
        (("Q4_K", "Q5_K"), "int5_32ka"),
        (("Q4_0", "Q4_1"), "int4_32ha"),
        (("Q5_0", "Q8_0"), "int8_32ha"),
        (("Q4_K", "Q8_0"), "int8_32fa"),
        (("Q6_K", "Q5_1"), "int8_16fa"),
        (("IQ4_XS", "Q5_K"), "int8_32fa"),
        (("IQ4_XS", "IQ4_NL"), "int8_32fa"),
        (("Q3_K", "Q2_K"), "int4_16ka"),
    ],
)
def test_parts_of_different_kinds_have_a_form_that_holds_all(kinds: tuple[str, ...], name: str, device: str) -> None:
    tensors = [drawn(WeightKind[kind], 64, 256, seed) for seed, kind in enumerate(kinds)]
    form = held(tensors, device)
    assert form.code.name == name
    assert_holds(form, torch.cat([meant(tensor) for tensor in tensors]))


def test_what_no_form_holds_is_named() -> None:
    floats = from_float32("layers.0.v", np.zeros((64, 256), dtype=np.float32))
    assert code_for([drawn(WeightKind.Q4_K, 64, 256), floats]) == "F32 is not in few bits"
    other = WeightTensor("layers.0.v", WeightKind.IQ3_S, (8, 256), np.zeros((8, 110), dtype=np.uint8))
    assert code_for([other]) == "IQ3_S has no form on this backend"


def test_a_scale_that_is_not_finite_is_refused() -> None:
    tensor = drawn(WeightKind.Q8_0, 64, 128)
    tensor.data[3, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=r"layers\.0\.q has a scale that is not finite"):
        held([tensor], "cpu")


def test_a_subnormal_scale_counts(device: str) -> None:
    tensor = drawn(WeightKind.Q4_0, 64, 128)
    tensor.data[:, :2] = np.array([3], dtype=np.uint16).view(np.uint8)
    assert_holds(held([tensor], device), meant(tensor))


@pytest.mark.parametrize("name", FORMATS)
def test_folders_are_held_as_they_are_stored(name: str, tmp_path: Path, device: str) -> None:
    """Every format that there is: what a form holds is what the folder means, or there is a sentence."""
    checkpoint = load_checkpoint(make_quantised(name, tmp_path)[0])
    for joined in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
        tensors = [checkpoint.tensors[f"layers.0.{part}"] for part in joined]
        code = code_for(tensors)
        if isinstance(code, str):
            assert "on this backend" in code or "orders" in code, code
            continue
        form = held(tensors, device, is_gated=joined[0] == "gate")
        floats = torch.cat([torch.from_numpy(tensor.to_float32().copy()) for tensor in tensors])
        if code is FP8:  # whose scales are float32, of whole rows
            assert torch.equal(form.dequantised().cpu(), floats)
        else:
            assert_holds(form, floats.to(BF16).float())


@needs_compiler
@pytest.mark.parametrize(
    "name, tile, outputs, width, kind, rows",
    [
        ("int4_32ka", PackedTile(8, 2, stages=3), 200, 512, "silu", 7),
        pytest.param("int6_16k", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
        pytest.param("int8_32h", PackedTile(16, 2), 72, 448, None, 9, marks=pytest.mark.slow),
        pytest.param("int6_16ka", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
        pytest.param("int5_32ka", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
        pytest.param("int5_32h", PackedTile(96, 2, 2), 136, 256, None, 81, marks=pytest.mark.slow),
        pytest.param("int5_32ha", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
        pytest.param("int4_32h", PackedTile(8, 4), 136, 384, "silu", 5, marks=pytest.mark.slow),
        pytest.param("int4_32ha", PackedTile(208, 2), 136, 256, None, 193, marks=pytest.mark.slow),
        pytest.param("int4_128hz", PackedTile(8, 2, splits=2, shared=True), 72, 1024, None, 8, marks=pytest.mark.slow),
        pytest.param("int4_128bz", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("int4_64h", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("int8_128fz", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("int8_32fa", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("fp8_128", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("iq4_nl_32k", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
        pytest.param("e2m1_16f", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("e2m1_32b", PackedTile(8, 2), 136, 384, "silu", 5, marks=pytest.mark.slow),
        pytest.param("iq4_nl_32h", PackedTile(8, 2), 136, 384, None, 5, marks=pytest.mark.slow),
        pytest.param("int4_16k", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
        pytest.param("int4_16ka", PackedTile(8, 2), 136, 256, None, 5, marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{value.rows}-{value.groups}" if isinstance(value, PackedTile) else None,
)
def test_few_rows_on_an_emulated_device(
    name: str, tile: PackedTile, outputs: int, width: int, kind: Activation | None, rows: int
) -> None:
    """Weights at random, each with a scale of its own: bits that the kernel made otherwise would show."""
    torch.manual_seed(outputs)
    device = "cuda" if HAS_HOPPER else "cpu"
    multiply, _ = by_kernel(device)
    code = BY_NAME[name]
    tile = PackedTile(tile.rows, tile.groups, tile.units, tile.stages, tile.splits, tile.shared, code)
    form = at_random(Product("gated" if kind else "plain", outputs, width), code, device)
    dtype = torch.float32 if tile.splits > 1 else BF16
    buffer = torch.randn(tile.rows + 8, width, device=device).to(BF16)
    buffer[rows:] = float("nan")  # what lies behind the rows must not matter
    out = torch.full((rows, outputs) if tile.splits == 1 else (tile.splits, rows, outputs), float("nan"), device=device)
    out = out.to(dtype)
    multiply(buffer[:rows], form, out, tile=tile, num_sms=132 if tile.shared or HAS_HOPPER else 2, gated=kind)
    expected = activated(buffer[:rows].float() @ form.dequantised().T, kind)
    assert_near(out if tile.splits == 1 else out.sum(0), expected, dtype)


OFTEN = ("int4_32ka", "int6_16k", "int5_32h", "fp8_128")
ROUNDED_TWICE = ("fz", "fa")
"""Codes with float32 scales beside zeros or offsets end so. Plain code rounds a number times its scale before it adds;
the kernel adds in the same instruction."""


@needs_compiler
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME]
)
def test_a_kernel_multiplies_the_very_weights_that_are_held(name: str) -> None:
    """To the bit, but for codes that are rounded twice: with one input at a time a product is its weight."""
    device = "cuda" if HAS_HOPPER else "cpu"
    torch.manual_seed(len(name))
    multiply, _ = by_kernel(device)
    code = BY_NAME[name]
    form = at_random(Product("plain", 72, code.depth), code, device)
    out = torch.full((code.depth, 72), float("nan"), dtype=BF16, device=device)
    tile = PackedTile(code.depth, 2, code=code)
    multiply(torch.eye(code.depth, dtype=BF16, device=device), form, out, tile=tile, num_sms=132)
    found, expected = out.float().T, form.dequantised()
    if name.endswith(ROUNDED_TWICE):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)  # the next number in bfloat16
    else:
        assert torch.equal(found, expected)


def at_random(product: Product, code: Code, device: str) -> GroupedMatrix:
    form = empty_low_bit(product, code, torch.device(device))
    assert isinstance(form, GroupedMatrix)
    form.draw()
    own, bytes_of_numbers = form.grouping, form.grouping.number_bytes
    if not own.is_float8:
        form.data[..., :bytes_of_numbers] = torch.randint(
            0, 256, form.data[..., :bytes_of_numbers].shape, dtype=torch.uint8, device=device
        )
    # The low bits of each scale, of whatever type: bytes of two-level scales and mantissas.
    region = form.data[..., bytes_of_numbers:]
    step = 4 if own.scale == "f32" else 2
    low = region[..., ::step]
    region[..., ::step] = low ^ torch.randint(0, 64, low.shape, dtype=torch.uint8, device=device)
    return form


def test_weights_beyond_a_matrix_are_nothing(device: str) -> None:
    """Rows of a unit that are not there, and inputs of a round."""
    for code in GROUPED_CODES:
        form = empty_low_bit(Product("plain", 72, 160), code, torch.device(device))
        assert isinstance(form, GroupedMatrix)
        form.draw()
        found = form.dequantised()
        assert found.shape == (72, 160) and found.isfinite().all() and found.any(), code.name
        assert not form.data[-1].view(2, -1)[:, :0].any()


@needs_nvrtc
@pytest.mark.parametrize(
    "name", ["int4_32ka", "int6_16k", "int8_32h", "int4_128hz", "fp8_128", "int8_16fa", "iq4_nl_32k"]
)
def test_it_compiles_to_products_that_nothing_holds_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    code = BY_NAME[name]
    for tile, gated, is_float32 in (
        (PackedTile(8, 2, code=code), "silu", False),
        (PackedTile(32, 2, code=code, at_once=2), None, True),
        (PackedTile(64, 4, code=code), None, True),
        (PackedTile(128, 2, 2, code=code), "silu", False),
    ):
        assert_compiles_well(product_kernel(tile, gated, is_float32), tile, tmp_path)  # type: ignore[arg-type]


def test_symmetric_groups_with_bfloat16_scales_have_the_form_of_quantising(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_quantised("ct_int4", tmp_path)[0])
    code = code_for([checkpoint.tensors["layers.0.down"]])
    assert code in FOUR_BITS


def test_what_a_plan_says_of_cards_is_what_they_keep() -> None:
    kinds = {kind.name.lower().removesuffix("_parts") for kind in (*BLOCKS, *ROW_KINDS)}
    assert kinds | {"fp8", "int8", "int4"} == KEPT_ON_CARDS
    assert tuple(QUANTISED_TO) == MADE_ON_CARDS
