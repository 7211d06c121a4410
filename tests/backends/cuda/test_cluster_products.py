"""Products of hundreds of rows and more in clusters: how they are cut, that the kernel compiles where its compiler is
at hand, and that it is right on the card."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from twostroke.backends.cuda import native, products
from twostroke.backends.cuda.kernels.cluster_products import cluster_product, source_and_constants
from twostroke.backends.cuda.kernels.cluster_tiles import (
    LONG_TILES,
    MAX_SPLIT_ROWS,
    PARTS,
    SHARED_BYTES,
    ClusterTile,
    choose_cluster_tile,
    long_gate_tiles,
)
from twostroke.backends.cuda.kernels.product_tiles import DEPTH
from twostroke.backends.cuda.products import Products, ProductScratch
from twostroke.cache import read_entry, write_entry
from twostroke.models.loading import read_folder_spec

ROWS = [65, 128, 129, 160, 192, 193, 256, 257, 512, 640, 1280, 2048, 8192]
SHAPES = [
    (14336, 4096),
    (4096, 14336),
    (6144, 16384),
    (6400, 17920),
    (8192, 28672),
    (4096, 4096),
    (2048, 4096),
    (3072, 1024),
    (1024, 3072),
    (200, 128),
]


@pytest.mark.parametrize("outputs, width", SHAPES)
@pytest.mark.parametrize("num_sms", [78, 114, 132, 144])
def test_every_cut_fits_the_chip_and_the_scratch(outputs: int, width: int, num_sms: int):
    kinds = ((True, False), (False, True), (False, False))
    for rows, (gated, may_split) in product(ROWS, kinds):
        tile = choose_cluster_tile(rows, outputs, width, num_sms, gated=gated, may_split=may_split)
        if tile is None:
            continue
        assert tile.parts == 1 or (tile.is_split and tile.parts <= PARTS)
        assert tile.stages >= 3 and tile.shared_bytes <= SHARED_BYTES
        assert tile.outputs % (16 if gated else 8) == 0
        piece = tile.outputs // tile.pieces
        assert piece * tile.pieces == tile.outputs and piece % 8 == 0 and piece <= 256  # what an instruction has
        assert tile.row_blocks * tile.outputs // 2 <= 192  # sums a thread
        assert tile.rows % (8 * tile.cluster) == 0
        if tile.is_split:
            assert may_split and width % (DEPTH * tile.cluster * tile.parts) == 0 and rows <= MAX_SPLIT_ROWS
            assert -(-outputs // tile.outputs) * tile.cluster * tile.parts <= num_sms  # in one wave


def test_a_model_s_gate_is_spread_evenly():
    """Of 132 multiprocessors 128 have one block of an 8B's gate each, or two at twice the rows."""
    few = choose_cluster_tile(192, 14336, 4096, 132, gated=True)
    many = choose_cluster_tile(256, 14336, 4096, 132, gated=True)
    assert few is not None and 2 * 14336 / few.outputs == 128
    assert many is not None and 2 * 14336 / many.outputs == 256


@pytest.mark.parametrize(
    "rows, tile",
    [
        (384, ClusterTile(224, 1, 3)),
        (512, ClusterTile(224, 1, 2)),
        (640, ClusterTile(224, 1, 2)),
        (768, ClusterTile(224, 1, 3)),
        (1024, ClusterTile(176, 2, 2)),
        (1152, ClusterTile(224, 1, 3)),
        (1280, ClusterTile(192, 2, 2)),
        (1536, ClusterTile(192, 2, 2)),
        (8192, ClusterTile(192, 2, 2)),
    ],
)
def test_a_prompt_s_gates_leave_few_programs_without_work(rows: int, tile: ClusterTile):
    """An 8B's, in waves of 66 pairs of programs."""
    assert choose_cluster_tile(rows, 14336, 4096, 132, gated=True) == tile
    pairs = -(-rows // tile.rows) * -(-2 * 14336 // (2 * tile.outputs))
    done = -(-pairs // 66) * 132 * tile.rows * tile.outputs
    assert done < 1.07 * rows * 2 * 14336


@pytest.mark.parametrize("outputs, width", [(14336, 4096), (3072, 1024), (200, 128), (196, 128), (14336, 4000)])
def test_what_start_up_compiles_is_what_a_prompt_s_gates_launch(outputs: int, width: int):
    known = long_gate_tiles(outputs, width, 132)
    chosen = {choose_cluster_tile(rows, outputs, width, 132, gated=True) for rows in range(257, 8193)} - {None}
    assert chosen <= known <= {tile for tile, _, _ in LONG_TILES}
    assert bool(known) == (outputs % 8 == 0 and width % DEPTH == 0), "others it could not even be asked for"


def test_start_up_has_all_kernels_of_gates_compiled(monkeypatch: pytest.MonkeyPatch):
    """Those of every tile, and the one behind cuBLAS, which steps of some sizes alone take."""
    _, spec = read_folder_spec(Path(__file__).parents[3] / "bench" / "shapes" / "llama-3.2-1b")
    ours = Products(spec, ProductScratch(spec, 1, torch.bfloat16, torch.device("cpu")))
    multiplied, activated = [], []
    monkeypatch.setattr(ours, "_num_sms", 132)
    monkeypatch.setattr(ours, "_multiply", lambda x, weight, packed, out, tile, **_: multiplied.append(tile))
    monkeypatch.setattr(products, "gated", lambda gate_up, out, **_: activated.append((gate_up.shape, out.shape)))
    for has_clusters, width, expected in (
        (False, 2048, set()),
        (True, 2048, long_gate_tiles(8192, 2048, 132)),
        (True, 2040, set()),
    ):
        monkeypatch.setattr(ours, "_has_clusters", has_clusters)
        multiplied.clear()
        ours.prepare(torch.zeros(1, width), torch.zeros(1, width), torch.zeros(1, 8192))
        assert set(multiplied) == expected and len(multiplied) == len(expected)
    assert activated == [((1, 16384), (1, 8192))] * 3


def test_what_it_does_not_take_is_left_to_others():
    assert choose_cluster_tile(64, 14336, 4096, 132, gated=True) is None
    assert choose_cluster_tile(192, 14336, 4000, 132, gated=True) is None
    assert choose_cluster_tile(192, 4096, 4096, 132) is None
    assert choose_cluster_tile(257, 4096, 4096, 132, may_split=True) is None
    assert choose_cluster_tile(192, 1024, 2048, 132, may_split=True) is None  # 32 programs for 132 multiprocessors
    assert choose_cluster_tile(300, 14336, 4096, 132, gated=True) is None  # a quarter of its tiles would be padding
    assert choose_cluster_tile(384, 3072, 1024, 132, gated=True) is None  # a fifth of the multiprocessors would wait


@pytest.mark.parametrize("outputs, pieces", [(48, 1), (224, 2), (256, 2)])
def test_the_instruction_names_every_sum(outputs: int, pieces: int):
    tile = ClusterTile(outputs, 1, 3)
    assert tile.pieces == pieces
    source, name, constants = source_and_constants(tile, None, torch.float16, False)
    width = outputs // pieces
    assert f"m64n{width}k16.f32.f16.f16" in source and f"void {name}(" not in source[: source.index("constexpr")]
    instruction = source[: source.index("constexpr")]
    assert [int(i) for i in re.findall(r'"\+f"\(sums\[(\d+)\]\)', instruction)] == list(range(width // 2))
    assert constants["OUTPUTS"] == outputs and constants["PIECES"] == pieces


def _has_compiler() -> bool:
    try:
        native._nvrtc()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_compiler(), reason="torch was installed without NVRTC")
def test_it_compiles_without_a_card_and_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    for tile, gated in ((ClusterTile(224, 1, 3), "silu"), (ClusterTile(128, 1, 3, 4, is_split=True), None)):
        source, _, constants = source_and_constants(tile, gated, torch.bfloat16, tile.is_split)
        code = native.compiled(source, constants, "sm_90a")
        (kept,) = [path for path in (tmp_path / "cuda").iterdir() if read_entry(path) == code]
        write_entry(kept, b"kept")
        assert native.compiled(source, constants, "sm_90a") == code, "this process has it already"
        native._builds.clear()
        assert native.compiled(source, constants, "sm_90a") == b"kept"
        kept.write_bytes(kept.read_bytes()[:-1])  # a machine that stopped too soon
        native._builds.clear()
        assert native.compiled(source, constants, "sm_90a") == code
    with pytest.raises(native.NativeError, match="does not compile"):
        native.compiled("nonsense", {}, "sm_90a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_what_is_missing():
    assert native.why_not() is not None


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [65, 129, 150, 192, 200, 256, 300, 512, 1100])
def test_products_at_random(rows: int, dtype: torch.dtype):
    torch.manual_seed(rows)
    tiles = [
        (ClusterTile(64, 1, 3, 2, is_split=True), None),
        (ClusterTile(128, 2, 2, 4, is_split=True), None),
        (ClusterTile(128, 2, 2, 2, is_split=True, parts=2), None),
        (ClusterTile(96, 1, 4, cluster=1), None),
        (ClusterTile(192, 1, 2, 4, is_split=True), None),
        *((tile, kind) for tile, _, _ in LONG_TILES for kind in ("silu", "gelu_tanh")),
        (ClusterTile(112, 2, 2), "silu"),
    ]
    for (outputs, width), (tile, gated) in ((shape, tile) for shape in [(1024, 2048), (200, 512)] for tile in tiles):
        buffer = torch.randn(rows + 256, width, dtype=dtype, device="cuda")
        has_room = width == 2048
        x = buffer[:rows] if has_room else buffer[:rows].clone()
        if has_room:
            buffer[rows:] = float("nan")  # what lies behind the rows must not matter
        weight = torch.randn(outputs * (2 if gated else 1), width, dtype=dtype, device="cuda") * width**-0.5
        reference = x.float() @ weight.float().t()
        if gated:
            gate, up = reference.chunk(2, dim=1)
            activated = functional.silu(gate) if gated == "silu" else functional.gelu(gate, approximate="tanh")
            reference = activated * up
        kind = torch.float32 if tile.is_split else dtype
        first = None
        for _ in range(6):
            shape = (rows, outputs) if tile.parts == 1 else (tile.parts, rows, outputs)
            out = torch.full(shape, float("nan"), dtype=kind, device="cuda")
            cluster_product(x, weight, out, tile=tile, num_sms=132, gated=gated)
            found = out.float().reshape(tile.parts, rows, outputs).sum(0)
            assert (found - reference).norm() / reference.norm() < 5e-3
            first = found if first is None else first
            assert torch.equal(found, first)
