"""Products of hundreds of rows and more in clusters: how they are cut, that the kernel compiles where its compiler is
at hand, and that it is right on the card."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.tables import H200
from torch.nn import functional

from twostroke.backends.cuda import native
from twostroke.backends.cuda.kernels.cluster_products import cluster_product, kernel_for
from twostroke.backends.cuda.kernels.cluster_tiles import CLUSTER_SHARED_BYTES, ClusterProducts, ClusterTile
from twostroke.backends.cuda.kernels.product import DEPTH, MAX_PART_ROWS, Card, Product, Role
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.products import Products
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.cache import read_entry, write_entry
from twostroke.models.loading import read_folder_spec

KERNEL = ClusterProducts()
LONG_TILES = [ClusterTile(*tile) for tile in ((192, 2, 2), (224, 1, 3), (176, 2, 2), (224, 1, 2))]
"""For gates of prompts."""


@pytest.mark.parametrize("num_sms", [78, 132, 144])
@pytest.mark.parametrize("role", ["plain", "gated", "join", "head"])
def test_every_candidate_fits_the_chip_and_the_scratch(role: Role, num_sms: int):
    num_found = 0
    shapes = ((14336, 4096), (4096, 14336), (6400, 17920), (2048, 4096), (1024, 3072), (200, 128))
    for rows, (outputs, width) in product((1, 16, 65, 128, 129, 192, 256, 257, 640, 8192), shapes):
        asked, card = Product(role, outputs, width), Card("a card", num_sms, has_hopper_kernels=True)
        for settings in KERNEL.candidates(asked, rows, card):
            tile = KERNEL.tile(asked, rows, card, settings)
            assert isinstance(tile, ClusterTile)
            num_found += 1
            assert tile.stages >= 3 and tile.shared_bytes <= CLUSTER_SHARED_BYTES
            assert tile.outputs % (16 if role == "gated" else 8) == 0
            piece = tile.outputs // tile.pieces
            assert piece * tile.pieces == tile.outputs and piece % 8 == 0 and piece <= 256  # what an instruction has
            assert tile.row_blocks * tile.outputs // 2 <= 192  # sums a thread
            assert tile.copied_rows(rows) % (8 * tile.cluster) == 0 and tile.copied_rows(rows) <= tile.rows
            assert tile.copied_rows(rows) >= min(rows, tile.rows)
            if tile.is_split:
                assert role == "join" and width % (DEPTH * tile.splits) == 0 and tile.parts * rows <= MAX_PART_ROWS
    assert num_found > 100


@pytest.mark.parametrize(
    "asked, rows, settings, reason",
    [
        (Product("gated", 14336, 4000), 192, {"outputs": 224}, "in multiples of 64"),
        (Product("plain", 4096, 4096, has_bias=True), 192, {"outputs": 224}, "adds no bias"),
        (Product("plain", 4096, 4096), 192, {"outputs": 128, "is_split": True}, "nobody adds up"),
        (Product("join", 4096, 4160), 192, {"outputs": 128, "is_split": True}, "uneven"),
        (Product("join", 4096, 4096), 300, {"outputs": 128, "is_split": True, "parts": 8}, "too many"),
        (Product("gated", 4096, 4096), 192, {"outputs": 232}, "instructions of eights"),
        (Product("plain", 4096, 4096), 192, {"outputs": 256, "row_blocks": 2}, "does not fit"),
    ],
)
def test_what_it_does_not_take_is_declined_with_a_reason(
    asked: Product, rows: int, settings: dict[str, int], reason: str
):
    given = {"row_blocks": 1, "groups": 3} | settings
    assert reason in str(KERNEL.tile(asked, rows, H200, given))
    other = Card("another", 108, has_hopper_kernels=False)
    assert "needs a Hopper GPU" in str(KERNEL.tile(asked, rows, other, given)) and not KERNEL.candidates(
        asked, rows, other
    )


def test_start_up_meets_every_kernel_of_long_products(monkeypatch: pytest.MonkeyPatch):
    """Those of every tile, and the one behind cuBLAS, which steps of some sizes alone take."""
    asked = Product("gated", 14336, 4096)
    choices = Choices.on(H200)
    spec = read_folder_spec(Path(__file__).parents[3] / "bench" / "shapes" / "llama-3.1-8b")[1]
    ours = Products(spec, ProductScratch(spec, 1, torch.bfloat16, torch.device("meta")), choices)
    matrix = Matrix("gate_up", asked, {"plain": Plain(torch.empty(asked.shape, device="meta"))})
    met = {str(choices.of(asked, rows, ("plain",)).tile) for rows in ours.long_rows(matrix)}
    assert met == {str(choices.of(asked, rows, ("plain",)).tile) for rows in range(257, 8193)}
    assert len(met) > 3 and any("Cublas" in name for name in met)


@pytest.mark.parametrize("outputs, pieces", [(48, 1), (224, 2), (256, 2)])
def test_the_instruction_names_every_sum(outputs: int, pieces: int):
    tile = ClusterTile(outputs, 1, 3)
    assert tile.pieces == pieces
    kernel = kernel_for(tile, 192, None, torch.float16, False)
    source, name, constants = kernel.source, kernel.name, kernel.constants
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
    tiles = (
        (ClusterTile(224, 1, 3), "silu"),
        (ClusterTile(128, 1, 3, 4, is_split=True), None),
        (ClusterTile(64, 1, 1), None),
    )
    for tile, gated in tiles:
        kernel = kernel_for(tile, tile.rows, gated, torch.bfloat16, tile.is_split)
        code = kernel.compile()
        (kept,) = [path for path in (tmp_path / "cuda").iterdir() if read_entry(path) == code]
        write_entry(kept, b"kept")
        assert kernel.compile() == code, "this process has it already"
        native._builds.clear()
        assert kernel.compile() == b"kept"
        kept.write_bytes(kept.read_bytes()[:-1])  # a machine that stopped too soon
        native._builds.clear()
        assert kernel.compile() == code
    with pytest.raises(native.NativeError, match="does not compile"):
        native.compiled("nonsense", {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_what_is_missing():
    assert native.why_not() is not None


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 9, 17, 64, 65, 129, 150, 192, 200, 256, 300, 512, 1100])
def test_products_at_random(rows: int, dtype: torch.dtype):
    torch.manual_seed(rows)
    tiles = [
        (ClusterTile(64, 1, 3, 2, is_split=True), None),
        (ClusterTile(128, 2, 2, 4, is_split=True), None),
        (ClusterTile(128, 2, 2, 2, is_split=True, parts=2), None),
        (ClusterTile(96, 1, 4, cluster=1), None),
        (ClusterTile(192, 1, 2, 4, is_split=True), None),
        *((tile, kind) for tile in LONG_TILES for kind in ("silu", "gelu_tanh")),
        *((ClusterTile(64, 1, groups, cluster), "silu") for groups in (1, 2) for cluster in (1, 2)),
        *((ClusterTile(outputs, 1, 1, 1, is_split=True, parts=parts), None) for outputs, parts in ((48, 8), (128, 4))),
        (ClusterTile(192, 1, 1, 1), None),
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
