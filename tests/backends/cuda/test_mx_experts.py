"""Experts in MXFP4 as files have them: loaded bit by bit, read by both paths; a whole model against the reference."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Sizes, first_tokens_apart, mixed_requests, play
from tests.backends.cuda.packed_case import needs_hopper
from tests.models.quantised.folders import write_folder
from tests.models.quantised.test_folders import mx_parts
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY, device_here
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_tiles import FewTile, GroupedTile
from twostroke.backends.cuda.kernels.moe_decode import Routed, few_tokens_down, few_tokens_gate_up
from twostroke.backends.cuda.kernels.moe_grouped import grouped_matmul
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.row_forms import MX
from twostroke.backends.cuda.model_matrices import held_of, held_weight_bytes, read_bytes
from twostroke.backends.cuda.stored_numbers import fill_stored
from twostroke.core.errors import ModelError
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind, WeightTensor

SMALL = GroupedTile(16, 32, 32, num_warps=4, num_stages=2, bulk=False)
EXPERTS, HIDDEN, WIDTH = 3, 96, 64


def drawn(rng: np.random.Generator, *shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device)


def matrix(rng: np.random.Generator, rows: int, width: int, device: str) -> ExpertMatrix:
    """Every number of four bits, powers about one, and the least power."""
    made = ExpertMatrix.empty((EXPERTS, rows, width), MX, torch.device(device))
    made.data.copy_(torch.from_numpy(rng.integers(0, 256, tuple(made.data.shape)).astype(np.uint8)))
    made.scales.copy_(torch.from_numpy(rng.integers(120, 128, tuple(made.scales.shape)).astype(np.uint8)))
    made.scales[0, 0, 0] = 0
    return made


@pytest.mark.parametrize("weights_first", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_paths_multiply_by_the_floats_that_they_stand_for(
    device: str, weights_first: bool, has_bias: bool
) -> None:
    rng = np.random.default_rng(4)
    gates, downs = matrix(rng, 2 * WIDTH, HIDDEN, device), matrix(rng, HIDDEN, WIDTH, device)
    check_both_paths(gates, downs, device, weights_first=weights_first, has_bias=has_bias)


def check_both_paths(
    gates: ExpertMatrix, downs: ExpertMatrix, device: str, *, weights_first: bool, has_bias: bool
) -> None:
    rng, top_k, tokens = np.random.default_rng(4), 2, 5
    biases = [drawn(rng, EXPERTS, rows, device=device) if has_bias else None for rows in (2 * WIDTH, HIDDEN)]
    x = drawn(rng, tokens, HIDDEN, device=device)
    chosen = torch.from_numpy(np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(tokens)]).astype(np.int32))
    shares = torch.from_numpy(rng.random((tokens, top_k)).astype(np.float32))
    pairs = chosen.flatten().argsort(stable=True).to(torch.int32)
    starts = torch.searchsorted(chosen.flatten().sort().values, torch.arange(EXPERTS + 1)).to(torch.int32)
    order = Order(pairs.to(device), starts.to(device), top_k)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    inner = torch.zeros(tokens * top_k, WIDTH, dtype=torch.float64)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        gate_up = gates.dequantised()[expert].double().cpu() @ x[pair // top_k].double().cpu()
        if biases[0] is not None:
            gate_up += biases[0][expert].cpu()
        inner[pair] = torch.nn.functional.silu(gate_up[:WIDTH]) * gate_up[WIDTH:]
        found = downs.dequantised()[expert].double().cpu() @ inner[pair]
        if biases[1] is not None:
            found += biases[1][expert].cpu()
        expected[pair // top_k] += shares.flatten()[pair] * found
    tile = replace(SMALL, weights_first=weights_first)
    activations = torch.full((tokens * top_k, WIDTH), float("nan"), device=device)
    outputs = torch.full((tokens * top_k, HIDDEN), float("nan"), device=device)
    grouped_matmul(x, gates, activations, order, tile=tile, bias=biases[0], gated="silu")
    torch.testing.assert_close(activations.cpu(), inner[pairs.long()].float(), rtol=1e-4, atol=1e-4)
    grouped_matmul(activations, downs, outputs, order, tile=tile, bias=biases[1])
    summed = torch.zeros(tokens, HIDDEN).index_add_(
        0, pairs.long() // top_k, outputs.cpu() * shares.flatten()[pairs.long(), None]
    )
    torch.testing.assert_close(summed, expected.float(), rtol=1e-4, atol=1e-3)
    few, routed = FewTile(32, 64), Routed(top_k, chosen=chosen.to(device), shares=shares.to(device))
    out = torch.full((tokens, HIDDEN), float("nan"), device=device)
    few_tokens_gate_up(x, routed, gates, activations, bias=biases[0], tile=few)
    few_tokens_down(activations, routed, downs, out, normalise=True, bias=biases[1], tile=few)
    torch.testing.assert_close(out.cpu(), expected.float(), rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """gpt-oss as its makers store it."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    plain, model = make_tiny("gpt_oss", folder / "plain", **sizes)
    stored = {}
    for name, tensor in model.state_dict().items():
        if tensor.ndim != 3:
            stored[name] = tensor.contiguous()
            continue
        parts = [mx_parts(expert.T.contiguous()) for expert in tensor]
        blocks = torch.stack([packed for packed, _, _ in parts])
        stored[f"{name}_blocks"] = blocks.reshape(len(parts), tensor.shape[2], -1, 16)
        stored[f"{name}_scales"] = torch.stack([scales for _, scales, _ in parts])
    config = json.loads((plain / "config.json").read_text())
    unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": unquantised}
    return load_checkpoint(write_folder(folder / "found", config | {"quantization_config": mxfp4}, stored))


def test_experts_are_held_as_stored_where_that_is_asked_for(as_published: Checkpoint) -> None:
    formats = FACTORY.formats(as_published, FormatWish(weights=STORED))
    assert isinstance(formats, Formats) and (formats.weights, formats.arithmetic) == (STORED, "bf16")
    held, spec = held_of(as_published, formats), as_published.spec
    assert set(held.codes) == {f"layers.{layer}.{kind}" for layer in range(2) for kind in ("gate_up", "down")}
    values = 4 * 3 * 64 * 96
    floats = held_weight_bytes(as_published, Formats.of("bf16"))
    assert floats - held_weight_bytes(as_published, formats) == pytest.approx(2 * values * (2 - 17 / 32), rel=0.15)
    assert read_bytes(as_published, "layers.0.experts.0.down", formats) == 64 * 96 * 17 // 32
    assert read_bytes(as_published, "layers.0.q", formats) == 2 * spec.layers[0].grouped.query_width * 64
    default = FACTORY.formats(as_published)
    assert isinstance(default, Formats) and default.weights == (STORED if device_here.reads_few_bits() else "bf16")


def test_a_model_as_stored_says_what_the_reference_does(as_published: Checkpoint, device: str) -> None:
    sizes, requests = Sizes(step_tokens=12, max_rows=4, max_context=32), mixed_requests((3, 19, 1), (4, 3, 3, 2))
    backend = sizes.on_device(as_published, device, weights=STORED)
    matrices = backend._parts.decoder.weights.layers[1].matrices
    in_float32 = [("plain",), ("plain",), ("mxfp4",), ("mxfp4",)]
    assert [tuple(matrix.forms) for matrix in matrices] == in_float32
    ours = play(sizes.engine(as_published, backend), requests)
    assert ours == play(sizes.engine(as_published, sizes.on_reference(as_published)), requests)


@pytest.mark.gpu
@needs_hopper
def test_on_a_card_they_are_read_in_units(as_published: Checkpoint) -> None:
    """In bfloat16, as published: biases, clamped gates and powers of two."""
    sizes, requests = Sizes(), mixed_requests([3, 19, 40], [1] * 4, ignore_eos=True, logprobs=8)
    backend = sizes.on_device(as_published, "cuda", torch.bfloat16, weights=STORED)
    assert "mxfp4_units" in backend._parts.decoder.weights.layers[0].mlp.gate_up.forms
    ours = play(sizes.engine(as_published, backend), requests)
    theirs = play(sizes.engine(as_published, sizes.on_reference(as_published)), requests)
    assert first_tokens_apart(ours, theirs) < 0.1


def test_blocks_of_a_gguf_and_a_scale_that_is_no_number() -> None:
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 255, (2 * 2, 17)).astype(np.uint8)
    blocks[:, 0] = rng.integers(100, 130, 4)
    tensor = WeightTensor("a matrix", WeightKind.MXFP4, (2, 64), blocks.reshape(2, -1))
    place = ExpertMatrix.empty((1, 2, 64), MX, torch.device("cpu"))
    fill_stored(place, [tensor])
    np.testing.assert_array_equal(place.dequantised()[0].numpy(), tensor.to_float32())
    blocks[1, 0] = 255
    with pytest.raises(ModelError, match="a matrix has a scale that is not a number"):
        fill_stored(place, [WeightTensor("a matrix", WeightKind.MXFP4, (2, 64), blocks.reshape(2, -1))])
