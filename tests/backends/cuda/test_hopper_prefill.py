"""The Hopper kernel: that it compiles to asynchronous products anywhere, and that it is right on the card."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.backends.cuda.prefill_case import PrefillCase

from twostroke.backends.cuda.kernels.hopper_prefill import BLOCK, attend_prefill_hopper, masked_rounds

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from twostroke.backends.cuda.kernels.hopper_prefill import _hopper_prefill_kernel as kernel, masked_rounds

layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
rows = f"tensordesc<bf16[64,128],{layout!r}>"
arguments = dict(
    queries="*bf16", k_rows=rows, v_rows=rows, table="*i32", items="*i32", out="*bf16", partials="*fp32",
    log_sums="*fp32", scale_log2="fp32", query_stride="i32", table_stride="i32",
)
constants = dict(
    GROUP=4, KV_HEADS=8, HEAD_DIM=128, PAGE=64, TILE=128, BLOCK=64, MASKED=masked_rounds(32), WARPS=4, PINNED=False
)
names = kernel.arg_names
source = GluonASTSource(
    kernel, {name: arguments.get(name, "constexpr") for name in names},
    {(names.index(name),): value for name, value in constants.items()},
    {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if arguments.get(name, "").startswith("*")},
)
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4)).asm["ptx"]
print(code.count("wgmma.mma_async"), code.count("wgmma.wait_group.sync.aligned 1"), code.count("cp.async.bulk.tensor"))
"""


def test_it_compiles_to_asynchronous_products_without_a_card():
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    products, waits_that_leave_one_running, copies = map(int, run.stdout.split())
    # Two of the three rounds in the code (masked, whole) wait for scores while the values are still being multiplied.
    assert products == 72 and waits_that_leave_one_running == 2 and copies == 8


def test_the_diagonal_touches_no_more_blocks_than_are_masked():
    for tokens in (1, 2, 3, 8, 16, 32, 42, 64, 128):
        touched = max(
            (first + tokens - 1) // BLOCK + 1 - (first + 1) // BLOCK  # all blocks less those that every query reads
            for first in range(4 * BLOCK)
        )
        assert max(touched, 1) == masked_rounds(tokens)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 8, 128), (9, 3, 64), (4, 4, 128), (16, 2, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_segments_at_random(heads, kv_heads, head_dim, dtype, tile_rows, pinned):
    rng = np.random.default_rng(heads * 1000 + head_dim + tile_rows)
    fixed = [([1], [0]), ([1], [63]), ([1], [64]), ([130], [0]), ([64], [8192]), ([33, 1, 500], [31, 700, 129])]
    drawn = [
        (rng.integers(1, 300, size=3).tolist(), (rng.integers(0, 2000, size=3) * rng.integers(0, 2, size=3)).tolist())
        for _ in range(3)
    ]
    for counts, starts in fixed + drawn:
        case = PrefillCase.random(
            rng, counts, starts, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            block_size=int(rng.choice([64, 128])), dtype=dtype, device="cuda",
            tile_rows=tile_rows, num_sms=132, padding=int(rng.integers(0, 2)),
        )  # fmt: skip
        attend_prefill_hopper(
            case.queries, case.cache.k, case.cache.v, case.cache.table, case.work, case.out,
            scale=head_dim**-0.5, scratch=case.scratch, pinned=pinned,
        )  # fmt: skip
        case.check(head_dim**-0.5, sample=4, rng=rng)
