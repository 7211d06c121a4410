"""Products of some dozens of rows: how they are cut, that the kernel compiles to asynchronous products anywhere, and
that it is right on the card."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from tests.backends.cuda.tables import H200
from torch.nn import functional

from twostroke.backends.cuda.kernels.hopper_products import product
from twostroke.backends.cuda.kernels.product import DEPTH, MAX_PART_ROWS, Product
from twostroke.backends.cuda.kernels.product_tiles import (
    MAX_ROWS,
    SHARED_BYTES,
    GluonProducts,
    ProductTile,
    copied_rows,
    padded_rows,
)

KERNEL = GluonProducts()

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from twostroke.backends.cuda.kernels.hopper_products import _product_kernel as kernel

for rows, box, gated, out in ((64, 16, None, "*fp32"), (128, 128, "silu", "*bf16")):
    rows_of = lambda count: f"tensordesc<bf16[{count},64],{gl.NVMMASharedLayout.get_default_for([count, 64], gl.bfloat16)!r}>"
    arguments = dict(x_rows=rows_of(box), w_rows=rows_of(64), out=out, num_rows="i32", outputs="i32")
    constants = dict(
        ROWS=rows, OUTPUTS=64, DEPTH=64, ROUNDS=64, STAGES=7, WARPS=4, GATED=gated, EVEN=True, PDL=True
    )
    names = kernel.arg_names
    source = GluonASTSource(
        kernel, {name: arguments.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index("out"),): [["tt.divisibility", 16]], (names.index("outputs"),): [["tt.divisibility", 16]]},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4)).asm["ptx"]
    end = code.index("wgmma.wait_group.sync.aligned 0")
    print(
        code.count("wgmma.mma_async"), code.count("cp.async.bulk.tensor"), code.count("griddepcontrol.wait"),
        code.index("bar.sync", end) < code.index("st.shared", end),
    )
"""  # noqa: E501

SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (1024, 3072), (2048, 4096), (96, 64), (64, 128)]


def test_it_compiles_to_asynchronous_products_without_a_card():
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    plain, gated = (line.split() for line in run.stdout.splitlines())
    # 64 inputs are four instructions; a ring of seven and the loop copy weights and rows.
    assert plain == ["4", "16", "1", "True"]
    # Two row groups times two matrices.
    assert gated == ["16", "24", "1", "True"]


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 96, 97, 128])
@pytest.mark.parametrize("outputs, width", SHAPES)
def test_every_candidate_fits_and_covers_the_product(rows: int, outputs: int, width: int):
    assert rows <= copied_rows(rows) <= padded_rows(rows) <= MAX_ROWS
    for role in ("plain", "join", "gated"):
        asked = Product(role, outputs, width)
        for settings in KERNEL.candidates(asked, rows, H200):
            tile = KERNEL.tile(asked, rows, H200, settings)
            assert isinstance(tile, ProductTile)
            assert tile.shared_bytes(rows, gated=role == "gated") <= SHARED_BYTES
            assert width % (DEPTH * tile.splits) == 0 and tile.splits * rows <= MAX_PART_ROWS
            assert 1 <= tile.stages <= width // DEPTH // tile.splits
            assert tile.splits == 1 or role == "join"


def test_what_it_does_not_take_is_declined_with_a_reason():
    assert "128 rows of a block" in str(KERNEL.tile(Product("plain", 4096, 4096), 129, H200, {"outputs": 64}))
    assert "multiples of 64" in str(KERNEL.tile(Product("plain", 4096, 4000), 16, H200, {"outputs": 64}))
    assert "added up" in str(KERNEL.tile(Product("plain", 4096, 4096), 16, H200, {"outputs": 64, "splits": 2}))


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 9, 16, 30, 64, 65, 96, 128])
def test_products_at_random(rows: int, dtype: torch.dtype):
    torch.manual_seed(rows)
    for (outputs, width), has_room, gated in itertools.product(
        [(4096, 4096), (1024, 3072), (200, 128), (96, 64)], (False, True), (None, "silu", "gelu_tanh")
    ):
        buffer = torch.randn(MAX_ROWS, width, dtype=dtype, device="cuda")
        x = buffer[:rows] if has_room else buffer[:rows].clone()
        if has_room:
            buffer[rows:] = float("nan")  # what lies behind the rows must not matter
        weight = torch.randn(outputs * (2 if gated else 1), width, dtype=dtype, device="cuda") * width**-0.5
        tile = KERNEL.tile(Product("gated" if gated else "join", outputs, width), rows, H200, {"outputs": 64})
        assert isinstance(tile, ProductTile)
        shape = (tile.splits, rows, outputs) if tile.splits > 1 else (rows, outputs)
        kind = torch.float32 if tile.splits > 1 else dtype
        reference = x.float() @ weight.float().t()
        if gated:
            gate, up = reference.chunk(2, dim=1)
            activated = functional.silu(gate) if gated == "silu" else functional.gelu(gate, approximate="tanh")
            reference = activated * up
        first = None
        for _ in range(5):
            out = torch.full(shape, float("nan"), dtype=kind, device="cuda")
            product(x, weight, out, tile=tile, gated=gated)
            found = out.sum(0) if tile.splits > 1 else out.float()
            assert (found - reference).norm() / reference.norm() < 5e-3
            first = found if first is None else first
            assert torch.equal(found, first)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [129, 150, 192])
@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("dtype, outputs", [(torch.bfloat16, 5120), (torch.float16, 5000)])
def test_blocks_of_rows(rows: int, has_room: bool, dtype: torch.dtype, outputs: int):
    torch.manual_seed(rows)
    buffer = torch.randn(256, 2048, dtype=dtype, device="cuda")
    x = buffer[:rows] if has_room else buffer[:rows].clone()
    buffer[rows:] = float("nan")
    weight = torch.randn(outputs, 2048, dtype=dtype, device="cuda") / 45
    tile, reference = ProductTile(128, 8, row_blocks=3), x.float() @ weight.float().t()
    assert tile is not None and tile.row_blocks == 3
    for _ in range(6):
        out = torch.full((rows, outputs), float("nan"), dtype=dtype, device="cuda")
        product(x, weight, out, tile=tile)
        assert (out.float() - reference).norm() / reference.norm() < 5e-3


@pytest.mark.gpu
@needs_hopper
def test_warps_that_end_early_do_not_disturb_others():
    """Two warp groups: the faster one's sums once overwrote what the slower one was still multiplying from."""
    torch.manual_seed(0)
    x = torch.randn(MAX_ROWS, 4096, dtype=torch.bfloat16, device="cuda")[:64]
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") / 64
    tile = ProductTile(256, 5, num_warps=8, splits=4)
    reference = x.float() @ weight.float().t()
    for _ in range(50):
        out = torch.full((4, 64, 4096), float("nan"), device="cuda")
        product(x, weight, out, tile=tile)
        assert (out.sum(0) - reference).norm() / reference.norm() < 1e-3
