"""The experts' products on Hopper: how they are cut, that every kernel of the tables compiles to asynchronous products
without a card, and that they are right on one, whatever the routing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.compile_hopper_grouped import CHOSEN
from torch.nn import functional

from twostroke.backends.cuda.kernels.expert_tiles import HopperTile
from twostroke.backends.cuda.kernels.hopper_grouped import hopper_grouped_matmul
from twostroke.backends.cuda.kernels.moe_routing import Order

SCRIPT = Path(__file__).with_name("compile_hopper_grouped.py")
TILES = [
    *CHOSEN,
    (HopperTile(64, 64, 6, num_warps=4), True),
    (HopperTile(128, 64, 3), True),
    (HopperTile(64, 128, 4, num_warps=4, rows_in_bulk=True), False),
    (HopperTile(128, 128, 3), False),
]


@pytest.mark.slow
def test_they_compile_without_a_card(tmp_path: Path):
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    told = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, check=True)
    kernels = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(kernels) == len(CHOSEN)
    for found in kernels:
        assert found["stack"] == 0, f"{found['name']} spills registers"
        assert found["shared_bytes"] <= found["predicted_shared_bytes"] <= 227 * 1024, found
        # The products of a round are in flight while the next one's are issued: one wait in the loop, one behind it.
        assert found["matrix_instructions"] > 0 and found["product_waits"] == 2, found
        assert found["waits_for_the_kernel_before"] == 1 and found["bulk_copies"] > 0, found


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


def routing(counts: list[int], top_k: int) -> Order:
    """Pairs in any order, and where each expert's begin."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    num_pairs = int(starts[-1])
    pairs = torch.randperm(-(-num_pairs // top_k) * top_k)[:num_pairs].to(torch.int32)
    return Order(pairs.cuda(), starts.cuda(), top_k)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tile", "gated"), TILES)
def test_products_of_any_routing(tile: HopperTile, gated: bool, dtype: torch.dtype):
    torch.manual_seed(tile.rows)
    experts, top_k, num_inputs, num_outputs = 24, 3, 768, 512
    activation = "silu" if gated else None
    weights = torch.randn(experts, num_outputs * (2 if gated else 1), num_inputs, device="cuda").to(dtype)
    weights *= num_inputs**-0.5
    rows = tile.rows
    for counts in (
        [1] * experts,
        [rows] * experts,
        [0] * (experts - 1) + [5],
        [0] * 3 + [rows + 1, 2 * rows, 3] + [1] * (experts - 6),
        torch.randint(0, 2 * rows, (experts,)).tolist(),
    ):
        order = routing(counts, top_k)
        pairs, num_pairs = order.sorted_pairs, len(order.sorted_pairs)
        inputs = torch.randn(-(-num_pairs // top_k) if gated else num_pairs, num_inputs, device="cuda").to(dtype)
        sources = inputs[pairs.long() // top_k] if gated else inputs
        owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts)).tolist()
        expected = torch.cat(
            [
                sources[[i for i, e in enumerate(owner) if e == expert]].float() @ weights[expert].float().T
                for expert in range(experts)
            ]
        )
        if gated:
            gates, ups = expected.chunk(2, -1)
            expected = functional.silu(gates) * ups
        first = None
        for _ in range(3):
            found = torch.full((num_pairs, num_outputs), float("nan"), device="cuda", dtype=dtype)
            hopper_grouped_matmul(inputs, weights, found, order, tile=tile, gated=activation)
            assert (found.float() - expected).norm() / expected.norm() < 5e-3
            first = found if first is None else first
            assert torch.equal(found, first)
