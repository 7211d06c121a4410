"""Products with packed weights: how they are cut, that they compile without a card, and that the kernel is right, in an
emulation of its own text and on the card."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
from tests.backends.cuda.packed_case import REPEATS, Dense, compile_all, needs_compiler, needs_hopper

from twostroke.backends.cuda import native
from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.packed_products import packed_product, source_and_constants
from twostroke.backends.cuda.kernels.packed_tiles import (
    DENSE_ROWS,
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
from twostroke.backends.cuda.kernels.packed_weights import DEPTH, UNIT_ROWS, PackedMatrix
from twostroke.backends.cuda.products import ProductScratch
from twostroke.models.spec import ModelSpec

BF16, F32 = torch.bfloat16, torch.float32
SMS = 132
KINDS: list[dict[str, bool]] = [{"gated": True}, {"may_split": True}, {"is_float32": True}, {}]
QKV, OUT, GATE_UP, DOWN, HEAD = (96, 64), (64, 64), (448, 64), (64, 224), (2004, 64)
"""Units and rounds of an 8B's matrices."""


def held_rows(rows: int) -> int:
    return next(size for size in DENSE_ROWS if rows <= size)


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


def shapes() -> list[tuple[int, int]]:
    """Units and rounds from the smallest matrices that are packed, and odd ones, to large heads."""
    units = [1, 2, 7, 16, 32, 33, 40, 48, 64, 80, 96, 100, 131, 132, 133, 198, 263, 264, 448, 500, 896, 2004, 4000]
    rounds = [2, 16, 30, 32, 40, 62, 64, 80, 100, 112, 128, 152, 224, 256, 448, 512, 2048]
    return list(product(units, rounds))


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
    spec = ModelSpec.__new__(ModelSpec)
    for name, value in {"hidden_size": hidden, "intermediate_size": 1, "moe": None}.items():
        object.__setattr__(spec, name, value)
    sums = ProductScratch(spec, 1, BF16, torch.device("meta")).sums
    for rows, rounds, num_sms in product((64, 128, 200, MAX_DENSE_ROWS), (32, 128, 256, 512, 2048), (78, 132, 144)):
        tile = choose_packed_tile(rows, hidden // UNIT_ROWS, rounds, num_sms, may_split=True)
        assert tile is None or tile.splits * rows * hidden <= len(sums)


@needs_compiler
@pytest.mark.parametrize(
    "tile, outputs, kind, dtype, num_rows",
    [
        (PackedTile(8, 2, stages=3), 520, None, BF16, (1, 7, 8)),  # five tiles of two programs: the ring runs on
        (PackedTile(64, 2, stages=4, splits=2, shared=True), 72, None, F32, (33, 64)),
        (PackedTile(128, 2, 2, stages=3), 160, "silu", BF16, (65, 128)),
        (PackedTile(64, 4, stages=4), 200, "gelu_tanh", BF16, (33,)),
        pytest.param(PackedTile(32, 2, shared=True), 136, None, BF16, (17, 32), marks=pytest.mark.slow),
        pytest.param(PackedTile(96, 2, 2), 520, None, F32, (96,), marks=pytest.mark.slow),
        pytest.param(PackedTile(256, 2, splits=2), 136, None, F32, (161, 256), marks=pytest.mark.slow),
        pytest.param(
            PackedTile(160, 2, stages=5, splits=2, shared=True), 72, None, F32, (129,), marks=pytest.mark.slow
        ),
        pytest.param(PackedTile(16, 4), 200, "silu", BF16, (9, 16), marks=pytest.mark.slow),
        pytest.param(PackedTile(176, 2, 2), 136, "silu", BF16, (161,), marks=pytest.mark.slow),  # steps one by one
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
        case.check(5, PackedTile(8, 2), F32, num_sms=2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tile", [PackedTile(8, 2), PackedTile(96, 2, 2), PackedTile(176, 2, 2)])
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
    """Every kernel that rules can ask for on an H200: tiles, gates, float32 or not."""
    found: set[tuple[PackedTile, Activation | None, bool]] = set()
    for rows, (units, rounds), kind in product(DENSE_ROWS, shapes(), KINDS):
        tile = choose_packed_tile(rows, units, rounds, SMS, **kind)
        if tile is not None:
            alike = PackedTile(tile.rows, tile.groups, tile.units, shared=tile.shared)  # splits are no constant
            found.add((alike, "silu" if "gated" in kind else None, tile.splits > 1 or "is_float32" in kind))
    return found


def assert_compiles_well(source: tuple[str, str, dict[str, int]], tile: PackedTile, folder: Path) -> None:
    code = folder / "kernel.cubin"
    code.write_bytes(native.compiled(source[0], source[2], "sm_90a"))
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([disassembler, code], check=True, capture_output=True, text=True).stdout
    # Four instructions a round and unit, of two rounds where they are unpacked as a whole.
    assert len(re.findall("HGMMA", text)) == 4 * tile.units * (2 if tile.rows <= FEW_ROWS else 1)
    # A wait behind each group of products, and one behind the last: the compiler added none, and spilt no register
    # among them (where there are most sums, it may where they are stored).
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == (5 if tile.rows * tile.units > 320 else 3)
    among_products = text[text.index("HGMMA") : text.rindex("HGMMA")]
    assert not re.search(r"\b(STL|LDL)\b", among_products if tile.rows * tile.units >= 320 else text)


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="torch was installed without NVRTC")


@needs_nvrtc
@pytest.mark.parametrize(
    "tile, gated, is_float32",
    [(PackedTile(32, 4), "silu", False), (PackedTile(MAX_DENSE_ROWS, 2), None, True)],
)
def test_it_compiles_to_products_that_nothing_holds_up(
    tile: PackedTile, gated: Activation | None, is_float32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    assert_compiles_well(source_and_constants(tile, gated, is_float32, True), tile, tmp_path)


@pytest.mark.slow
@needs_nvrtc
def test_every_kernel_that_rules_ask_for_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    assert len(variants()) > 40
    for tile, gated, is_float32 in variants():
        assert_compiles_well(source_and_constants(tile, gated, is_float32, True), tile, tmp_path)


def on_card(rows: int) -> list[tuple[PackedTile, Activation | None, torch.dtype]]:
    """Plain, gated, in parts, as float32, groups in turns."""
    held = held_rows(rows)
    gates = PackedTile(held, 4) if held <= FEW_ROWS else PackedTile(held, 2, 2)
    return [
        (gates, "silu", BF16),
        (gates, "gelu_tanh", BF16),
        (PackedTile(held, 2), None, BF16),
        (PackedTile(held, 2, shared=True), None, BF16),
        (PackedTile(held, 2, shared=True, splits=2), None, F32),
        (PackedTile(held, 2, splits=4), None, F32),
        (PackedTile(held, 2), None, F32),
    ]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [1, 7, 8, 33, 64, 65, 96, 128, 160, 176, 192, 208, 256])
def test_products_on_a_card(rows: int) -> None:
    torch.manual_seed(rows)
    kernels = [each for each in on_card(rows) if each[0].units * each[0].rows <= MOST_SUMS]
    compile_all(
        source_and_constants(tile, kind, dtype == F32, pdl) for tile, kind, dtype in kernels for pdl in (False, True)
    )
    for outputs, width in ((4096, 4096), (1000, 512), (72, 2048)):
        cases = {kind: Dense(outputs, width, "cuda", kind) for kind in {kind for _, kind, _ in kernels}}
        for tile, kind, dtype in kernels:
            cases[kind].check(rows, tile, dtype, num_sms=SMS, pdl=(True, False) * REPEATS, has_room=width == 512)


@pytest.mark.gpu
@needs_hopper
def test_a_chain_of_products_is_replayed_as_it_was_launched() -> None:
    """Each starts to read weights while the one ahead still writes what it multiplies them with."""
    from twostroke.backends.cuda.kernels.packed_products import packed_product

    torch.manual_seed(0)
    up, down = (Dense(*shape, "cuda", kind) for shape, kind in (((8192, 2048), "silu"), ((2048, 8192), None)))
    x, between = torch.empty(24, 2048, dtype=BF16, device="cuda"), torch.empty(24, 8192, dtype=BF16, device="cuda")

    def chain() -> None:
        for _ in range(3):
            packed_product(x, up.packed, between, tile=PackedTile(32, 4), num_sms=SMS, gated="silu", pdl=True)
            packed_product(between, down.packed, x, tile=PackedTile(32, 2, shared=True), num_sms=SMS, pdl=True)

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
