"""The experts' products with packed weights: how they are cut, that they compile without a card, and that the kernel is
right whatever the routing, in an emulation of its own text and on the card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.backends.cuda.packed_case import (
    REPEATS,
    Experts,
    counts_of_rows,
    needs_compiler,
    needs_hopper,
)
from tests.backends.cuda.test_packed_products import assert_compiles_well, needs_nvrtc

from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_products import experts_kernel, packed_experts_product
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile

SMS = 132
EXPERT_ROWS = (8, 16, 24, 32, 40, 56)


def experts_tile(rows: int, *, gated: bool) -> PackedTile:
    """As the table has them."""
    return PackedTile(rows, *((2, 2) if gated else (4, 1)))


@needs_compiler
@pytest.mark.parametrize(
    "tile, outputs, kind",
    [
        (PackedTile(8, 2, 2, stages=3), 80, "silu"),
        pytest.param(PackedTile(8, 4, 1, stages=5), 320, None, marks=pytest.mark.slow),
        pytest.param(PackedTile(16, 2, 2, stages=3), 72, "gelu_tanh", marks=pytest.mark.slow),
        pytest.param(PackedTile(32, 4, 1), 136, None, marks=pytest.mark.slow),
        pytest.param(PackedTile(24, 2, 2, stages=6), 256, "silu", marks=pytest.mark.slow),
        pytest.param(PackedTile(56, 2, 2, stages=3), 80, "silu", marks=pytest.mark.slow),
    ],
)
def test_products_of_any_routing_on_an_emulated_device(tile: PackedTile, outputs: int, kind: Activation | None) -> None:
    torch.manual_seed(outputs)
    num_experts = 5
    case = Experts(num_experts, outputs, 256, "cpu", kind)
    for index, counts in enumerate(counts_of_rows(tile.rows, num_experts)):
        case.check(counts, tile, num_sms=4 + 3 * index)


@needs_nvrtc
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [16, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (8, 24, 32, 40, 56))])
def test_it_compiles_to_products_that_nothing_holds_up(
    rows: int, gated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    tile = experts_tile(rows, gated=gated)
    assert_compiles_well(experts_kernel(tile, 128, "silu" if gated else None), tile, tmp_path)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("rows", EXPERT_ROWS)
def test_products_of_any_routing_on_a_card(rows: int, kind: Activation | None) -> None:
    torch.manual_seed(rows)
    num_experts, tile = 24, experts_tile(rows, gated=kind is not None)
    for outputs, width in ((512, 2048), (1000, 256)):  # more rounds than stages, and fewer
        case = Experts(num_experts, outputs, width, "cuda", kind)
        for counts in counts_of_rows(rows, num_experts):
            case.check(counts, tile, num_sms=SMS, times=2 * REPEATS)
            case.check(counts, tile, num_sms=7)  # each program has many tiles


@pytest.mark.gpu
@needs_hopper
def test_a_replayed_product_follows_its_routing() -> None:
    """A graph holds where the routing lies, not what it is: the same launch, other experts."""
    torch.manual_seed(1)
    case, tile, num_pairs = Experts(16, 512, 1024, "cuda", "silu"), experts_tile(16, gated=True), 96
    inputs = torch.randn(num_pairs // 4, 1024, device="cuda").to(torch.bfloat16)
    pairs = torch.randperm(num_pairs).to(torch.int32).cuda()
    starts = torch.zeros(17, dtype=torch.int32, device="cuda")
    order = Order(pairs, starts, top_k=4)
    out = torch.empty(num_pairs, 512, dtype=torch.bfloat16, device="cuda")

    def multiply() -> None:
        packed_experts_product(inputs, case.packed, out, order, tile=tile, num_sms=SMS, gated="silu")

    multiply()  # of no rows: loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    for _ in range(10):
        owners = torch.randint(0, 16, (num_pairs,)).sort().values
        starts.copy_(torch.searchsorted(owners, torch.arange(17)).to(torch.int32))
        multiply()
        eager = out.clone()
        out.fill_(float("nan"))
        graph.replay()
        assert out.isfinite().all() and torch.equal(out, eager)
