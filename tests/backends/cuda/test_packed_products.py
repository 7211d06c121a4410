"""Products with packed weights: that they compile without a card, and that the kernel is right, in an emulation of its
own text and on the card."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
from tests.backends.cuda.packed_case import (
    REPEATS,
    SMS,
    Dense,
    compile_all,
    held_rows,
    needs_compiler,
    needs_hopper,
)
from tests.backends.cuda.tables import H200

from twostroke.backends.cuda import native
from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.packed_products import packed_product, product_kernel
from twostroke.backends.cuda.kernels.packed_tiles import DENSE_ROWS, MANY_SUMS, WHOLE_ROUND_ROWS, PackedTile
from twostroke.backends.cuda.kernels.packing import PackedMatrix
from twostroke.backends.cuda.tuned_table import Choices

BF16, F32 = torch.bfloat16, torch.float32


@needs_compiler
@pytest.mark.parametrize(
    "tile, outputs, kind, dtype, num_rows",
    [
        (PackedTile(8, 2, stages=3), 520, None, BF16, (1, 7, 8)),  # five tiles of two programs: the ring runs on
        (PackedTile(64, 2, stages=4, splits=2, shared=True), 72, None, F32, (33,)),
        pytest.param(PackedTile(128, 2, 2, stages=3), 160, "silu", BF16, (65, 128), marks=pytest.mark.slow),
        pytest.param(PackedTile(64, 4, stages=4), 200, "gelu_tanh", BF16, (33,), marks=pytest.mark.slow),
        pytest.param(PackedTile(32, 2, shared=True), 136, None, BF16, (17, 32), marks=pytest.mark.slow),
        pytest.param(PackedTile(96, 2, 2), 520, None, F32, (96,), marks=pytest.mark.slow),
        pytest.param(PackedTile(256, 2, splits=2), 136, None, F32, (161, 256), marks=pytest.mark.slow),
        pytest.param(
            PackedTile(160, 2, stages=5, splits=2, shared=True), 72, None, F32, (129,), marks=pytest.mark.slow
        ),
        pytest.param(PackedTile(16, 4), 200, "silu", BF16, (9, 16), marks=pytest.mark.slow),
        (PackedTile(176, 2, 2), 136, "silu", BF16, (161,)),  # steps one by one
    ],
)
def test_products_on_an_emulated_device(
    tile: PackedTile, outputs: int, kind: Activation | None, dtype: torch.dtype, num_rows: tuple[int, ...]
) -> None:
    torch.manual_seed(outputs)
    case = Dense(outputs, 512, "cpu", kind)
    for index, rows in enumerate(num_rows):
        case.check(rows, tile, dtype, num_sms=132 if tile.shared else 2, has_room=index % 2 == 0)


def small_cases(device: str) -> list[Dense]:
    """Weights that are subnormal to tensor cores, beside one of their row that meets zeros; and tiny inputs."""
    torch.manual_seed(0)
    weight = torch.randn(72, 512) * 2.0**-18
    weight[:, 0] = 1.0
    small = Dense(72, 512, device, given=weight.to(BF16), num_silent=1)
    assert 0 < float(small.weight[:, 1:].abs().max()) < 2.0**-14
    return [small, Dense(72, 512, device, input_scale=2.0**-20)]


@needs_compiler
def test_what_is_small_counts_on_an_emulated_device() -> None:
    for case in small_cases("cpu"):
        case.check(5, PackedTile(8, 2, shared=True, splits=2), F32, num_sms=132)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "tile", [PackedTile(8, 2, shared=True, splits=2), PackedTile(64, 4), PackedTile(96, 2, 2), PackedTile(176, 2, 2)]
)
def test_what_is_small_counts_on_a_card(tile: PackedTile) -> None:
    for case in small_cases("cuda"):
        case.check(tile.rows - 3, tile, F32, num_sms=SMS)


def _has_nvrtc() -> bool:
    try:
        native._nvrtc()
    except OSError:
        return False
    return True


def variants() -> set[tuple[PackedTile, Activation | None, bool]]:
    """Every kernel that the table asks for on an H200: tiles, gates, float32 or not."""
    found: set[tuple[PackedTile, Activation | None, bool]] = set()
    choices = Choices.on(H200)
    for asked, rows in product(choices.table.products, DENSE_ROWS):
        tile = choices.of(asked, rows, ("packed", "plain")).tile
        if isinstance(tile, PackedTile):
            alike = PackedTile(tile.rows, tile.groups, tile.units, shared=tile.shared)  # splits are no constant
            found.add((alike, "silu" if asked.is_gated else None, tile.splits > 1 or asked.role == "head"))
    return found


def assert_compiles_well(kernel: native.NativeKernel, tile: PackedTile, folder: Path) -> None:
    code = folder / "kernel.cubin"
    code.write_bytes(kernel.compile())
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([disassembler, code], check=True, capture_output=True, text=True).stdout
    # An instruction a step and unit, of two rounds where they are unpacked as a whole.
    calls = tile.code.depth // 16 // tile.steps
    assert len(re.findall("HGMMA", text)) == tile.code.depth // 16 * tile.units * (2 if calls == 1 else 1)
    # A wait behind each group of products, and one behind the last: the compiler added none, and spilt no register
    # among them (where there are most sums, it may where they are stored).
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == max(calls, 2) + 1
    loop = text[text.rindex("TRYWAIT", 0, text.index("HGMMA")) : text.rindex("HGMMA")]
    assert not re.search(r"\b(STL|LDL)\b", loop if tile.rows * tile.units >= MANY_SUMS else text)


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="torch was installed without NVRTC")


@needs_nvrtc
@pytest.mark.parametrize(
    "tile, gated, is_float32",
    [(PackedTile(32, 2), "silu", False), (PackedTile(192, 2, 2), None, True)],
)
def test_it_compiles_to_products_that_nothing_holds_up(
    tile: PackedTile, gated: Activation | None, is_float32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    assert_compiles_well(product_kernel(tile, gated, is_float32), tile, tmp_path)


@pytest.mark.slow
@needs_nvrtc
def test_every_kernel_that_the_table_asks_for_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    assert len(variants()) > 40
    for tile, gated, is_float32 in variants():
        assert_compiles_well(product_kernel(tile, gated, is_float32), tile, tmp_path)


def on_card(rows: int) -> list[tuple[PackedTile, Activation | None, torch.dtype]]:
    """What the table asks for, the other gate, and depths in parts."""
    held = held_rows(rows)
    found = [(tile, kind, F32 if is_float32 else BF16) for tile, kind, is_float32 in variants() if tile.rows == held]
    found += [(tile, "gelu_tanh", dtype) for tile, kind, dtype in found if kind == "silu"]
    return [*found, (PackedTile(held, 2, shared=True, splits=2), None, F32), (PackedTile(held, 2, splits=4), None, F32)]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [1, 7, 17, 33, *(rows - 3 for rows in DENSE_ROWS if rows > WHOLE_ROUND_ROWS), 256])
def test_products_on_a_card(rows: int) -> None:
    torch.manual_seed(rows)
    kernels = on_card(rows)
    compile_all(product_kernel(tile, kind, dtype == F32) for tile, kind, dtype in kernels)
    for outputs, width in ((4096, 4096), (1000, 512), (72, 2048)):
        cases = {kind: Dense(outputs, width, "cuda", kind) for kind in {kind for _, kind, _ in kernels}}
        for tile, kind, dtype in kernels:
            cases[kind].check(rows, tile, dtype, num_sms=SMS, times=2 * REPEATS, has_room=width == 512)


@pytest.mark.gpu
@needs_hopper
def test_a_chain_of_products_is_replayed_as_it_was_launched() -> None:
    """Each starts to read weights while the one ahead still writes what it multiplies them with."""
    torch.manual_seed(0)
    up, down = (Dense(*shape, "cuda", kind) for shape, kind in (((8192, 2048), "silu"), ((2048, 8192), None)))
    x, between = torch.empty(24, 2048, dtype=BF16, device="cuda"), torch.empty(24, 8192, dtype=BF16, device="cuda")

    def chain() -> None:
        for _ in range(3):
            packed_product(x, up.packed, between, tile=PackedTile(32, 2), num_sms=SMS, gated="silu")
            packed_product(between, down.packed, x, tile=PackedTile(32, 2, shared=True), num_sms=SMS)

    inputs = [torch.randn_like(x) for _ in range(8)]
    eager = []
    for given in inputs:
        x.copy_(given)
        torch.cuda.synchronize()
        chain()
        eager.append(x.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for given, expected in zip(inputs, eager, strict=True):
        x.copy_(given)
        graph.replay()
        assert x.isfinite().all() and torch.equal(x, expected)


def test_a_tile_that_would_hang_is_refused() -> None:
    """Of few rows a program takes its rounds in twos."""
    weight = PackedMatrix.empty((64, 3 * 64), "cpu")
    x, out = torch.zeros(8, 3 * 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
    with pytest.raises(AssertionError):
        packed_product(x, weight, out, tile=PackedTile(8, 2), num_sms=132)
