"""Which matrices get a copy for decode, what the copies take, and that they hold the layers' own weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.engines import Sizes
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import packed_copies, packed_sizes
from twostroke.backends.cuda.compile_ahead import compilers, rehearsal
from twostroke.backends.cuda.kernels.packed_format import packed_bytes
from twostroke.backends.cuda.kernels.packed_tiles import MAX_AVERAGE_ROWS, MAX_DENSE_ROWS, MIN_WEIGHTS
from twostroke.backends.cuda.kernels.packed_weights import PackedMatrix, unpacked
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.packed_copies import PackedLayer, decode_weights
from twostroke.backends.cuda.packed_sizes import packable, sizes_of
from twostroke.backends.cuda.weights import Weights
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.decoder import with_attention, with_mlps
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

BF16 = torch.bfloat16
SHAPES = Path(__file__).parents[3] / "bench" / "shapes"
TINY = 1 << 12
"""Weights of a matrix that is worth packing here, so that tiny models have copies."""
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}


def drawn(variant: str, folder: Path, **changes: Any) -> Checkpoint:
    return random_checkpoint(make_tiny(variant, folder, **{**WIDE, **changes})[0], WeightKind.BF16)


def placed(checkpoint: Checkpoint, device: str) -> Weights:
    weights, loader = Weights.placed(checkpoint, torch.device(device), BF16, pack_for_decode=True)
    loader.fill(None)
    return weights


@pytest.fixture(autouse=True)
def _tiny_matrices_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_sizes, "MIN_WEIGHTS", TINY)
    monkeypatch.setattr(packed_copies, "_sms_of", lambda device: None)  # by size alone, on a card as well


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return drawn("llama", tmp_path)


@pytest.fixture
def moe(tmp_path: Path) -> Checkpoint:
    return drawn("qwen3_moe", tmp_path, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=128)


def names(checkpoint: Checkpoint) -> list[str]:
    return [matrix.name for matrix in packable(checkpoint.spec)]


def assert_copy_of(weight: torch.Tensor, copy: PackedMatrix | None) -> None:
    assert copy is not None
    found = unpacked(copy, len(weight)).float()
    bound = weight.float().abs().amax(1, keepdim=True) * 2**-22
    assert found.shape == weight.shape and ((found - weight.float()).abs() <= bound).all()


def test_a_dense_layer_has_four_copies_of_its_own_weights(llama: Checkpoint, device: str) -> None:
    weights = placed(llama, device)
    assert weights.pack() == ()
    for layer in weights.layers:
        packed = layer.packed
        assert packed is not None and packed.gate_up is not None and packed.gate_up.is_gated
        assert_copy_of(layer.qkv, packed.qkv)
        assert_copy_of(layer.o, packed.o)
        assert_copy_of(layer.mlp.gate_up, packed.gate_up)
        assert_copy_of(layer.mlp.down, packed.down)
    assert_copy_of(weights.head, weights.packed_head.head)


def test_experts_copies_are_of_all_experts(moe: Checkpoint, device: str) -> None:
    weights = placed(moe, device)
    assert weights.pack() == ()
    for layer in weights.layers:
        packed = layer.packed
        assert packed is not None and packed.gate_up is not None and packed.down is not None
        for plain, copy in ((layer.mlp.gate_up, packed.gate_up), (layer.mlp.down, packed.down)):
            for expert in range(3):
                one = PackedMatrix(copy.data[expert], copy.factors[expert], copy.is_gated)
                assert_copy_of(plain[expert], one)
        assert_copy_of(layer.qkv, packed.qkv)


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("-inf"), marks=pytest.mark.slow)])
def test_a_matrix_with_weights_that_are_not_finite_stays_plain(bad: float, moe: Checkpoint, device: str) -> None:
    weights = placed(moe, device)
    weights.layers[1].o[3, 7] = bad
    weights.layers[0].mlp.down[2, 5, 9] = bad
    weights.head[1, 0] = bad
    assert weights.pack() == ("layers.0.down", "layers.1.o", "head")
    assert weights.packed_head.head is None
    first, second = (layer.packed for layer in weights.layers)
    assert first is not None and second is not None
    assert first.down is None and first.o is not None and first.gate_up is not None
    assert second.o is None and second.down is not None


def test_what_stays_plain_by_its_shape(tmp_path: Path) -> None:
    llama = drawn("llama", tmp_path / "all")
    assert names(llama) == ["qkv", "o", "gate_up", "down"]
    for biases, left in (
        ({"qkv_bias": True}, ["o", "gate_up", "down"]),
        ({"output_bias": True}, ["qkv", "gate_up", "down"]),
    ):
        assert names(replace(llama, spec=with_attention(llama.spec, **biases))) == left
    odd = drawn("llama", tmp_path / "odd", hidden_size=192, intermediate_size=256)
    assert names(odd) == ["down"], "three rounds of inputs are not an even number"
    assert PackedLayer.empty(odd.spec, BF16, torch.device("cpu")).num_bytes > 0
    assert PackedLayer.empty(odd.spec, torch.float16, torch.device("cpu")).num_bytes == 0


def test_small_dense_matrices_stay_plain_and_experts_do_not(
    llama: Checkpoint, moe: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_sizes, "MIN_WEIGHTS", 128 * 384)
    assert names(llama) == ["gate_up", "down"]
    monkeypatch.setattr(packed_sizes, "MIN_WEIGHTS", 128 * 384 + 1)
    assert names(llama) == ["gate_up"]
    monkeypatch.setattr(packed_sizes, "MIN_WEIGHTS", MIN_WEIGHTS)
    assert names(llama) == [] and names(moe) == ["gate_up", "down"]
    sizes = sizes_of(moe)
    assert isinstance(sizes, DecodeWeights) and sizes.dense is None and sizes.experts is not None


@pytest.mark.parametrize(
    "model, names_on_an_h200",
    [
        ("llama-3.1-8b", ["qkv", "o", "gate_up", "down"]),
        ("qwen3-30b-a3b", ["gate_up", "down"]),
        ("qwen3-0.6b", []),
    ],
)
def test_a_copy_is_held_where_products_read_it(
    model: str, names_on_an_h200: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_sizes, "MIN_WEIGHTS", MIN_WEIGHTS)
    checkpoint = random_checkpoint(SHAPES / model, WeightKind.BF16)
    assert [matrix.name for matrix in packable(checkpoint.spec, 132)] == names_on_an_h200
    sizes = sizes_of(checkpoint, 132)
    if not names_on_an_h200:
        assert "no matrix of this model has a size and shape" in str(sizes)
        return
    assert isinstance(sizes, DecodeWeights)
    head = checkpoint.held_tensor_bytes("embedding" if checkpoint.spec.tied_embeddings else "output")
    assert sizes.dense is not None
    assert (sizes.dense.replaced_bytes == head) == ("qkv" not in names_on_an_h200), "beside experts the head alone"


@pytest.mark.parametrize("variant", ["llama", "moe"])
def test_sizes_are_those_that_are_held(variant: str, device: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(variant)
    sizes = sizes_of(checkpoint)
    assert isinstance(sizes, DecodeWeights)
    weights, spec = placed(checkpoint, device), checkpoint.spec
    assert weights.packed_head.head is not None
    held = sum(layer.packed.num_bytes for layer in weights.layers if layer.packed) + weights.packed_head.head.num_bytes
    assert sizes.num_bytes == held > 0
    head, plain_head = packed_bytes(spec.vocab_size, 128), 2 * 128 * spec.vocab_size
    assert sizes.dense is not None and sizes.dense.max_tokens == MAX_DENSE_ROWS
    heads = spec.layers[0].grouped
    rows = heads.query_width + heads.kv_values
    attention = packed_bytes(rows, 128) + packed_bytes(128, heads.query_width)
    if variant == "llama":
        assert sizes.experts is None
        assert sizes.dense.num_bytes == head + 2 * (attention + packed_bytes(768, 128) + packed_bytes(128, 384))
        assert sizes.dense.replaced_bytes == plain_head + 2 * 2 * (128 * (rows + 128) + 3 * 128 * 384)
    else:
        assert sizes.dense.num_bytes == head + 2 * attention
        assert sizes.experts is not None and sizes.experts.max_tokens == MAX_AVERAGE_ROWS * 3 // 2
        assert sizes.experts.num_bytes == 2 * 3 * (packed_bytes(256, 128) + packed_bytes(128, 128))
        assert sizes.experts.replaced_bytes == 2 * 2 * 3 * 3 * 128 * 128


def test_a_device_that_cannot_says_why(llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(capability: tuple[int, int], why_not: str | None = None) -> DecodeWeights | str:
        target = replace(target_of("cpu"), interpreted=False, capability=capability)
        monkeypatch.setattr(packed_copies, "target_of", lambda device: target)
        monkeypatch.setattr(packed_copies.native, "why_not", lambda: why_not)
        return decode_weights(llama, Formats.of("bf16"))

    assert on((9, 0)) == sizes_of(llama, target_of("cpu").num_sms)
    assert on((8, 0)) == on((10, 0)) == "products with packed weights need a Hopper GPU (compute capability 9.0)"
    assert on((9, 0), "NVRTC is missing") == "products with packed weights have to be compiled, and NVRTC is missing"
    assert on((9, 0)) and decode_weights(llama, Formats.of("f16")) == (
        "packed weights are bf16 in fewer bits, and this computes in f16"
    )
    small = load_checkpoint(make_tiny("llama", tmp_path / "small")[0])
    assert "no matrix of this model has a size and shape" in str(decode_weights(small, Formats.of("bf16")))


def test_a_backend_holds_copies_only_when_asked(llama: Checkpoint, device: str) -> None:
    plain = Weights.placed(llama, torch.device(device), BF16)[0]
    assert plain.pack() == () and all(layer.packed is None for layer in plain.layers)
    backend = Sizes().on_device(llama, device, BF16, few_rows=None, pack_for_decode=True)
    assert "to pack copies for decode" in backend.notes[0]
    backend.close()


def test_a_rehearsal_packs_nothing(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = placed(llama, "cpu")
    rehearsed: list[torch.Tensor] = []
    monkeypatch.setattr(packed_copies, "pack_by_kernel", lambda weight, place: rehearsed.append(weight))
    with compilers() as threads, rehearsal(threads):
        assert weights.pack() == ()
    layer = weights.layers[0]
    expected = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down, weights.head)
    assert [weight.data_ptr() for weight in rehearsed] == [weight.data_ptr() for weight in expected]


def test_more_experts_than_the_kernel_has_room_for_stay_plain(moe: Checkpoint) -> None:
    assert moe.spec.moe is not None
    for experts, expected in ((256, ["gate_up", "down"]), (257, [])):
        many = with_mlps(moe.spec, [replace(moe.spec.moe, num_experts=experts)] * moe.spec.num_layers)
        assert [matrix.name for matrix in packable(many) if matrix.is_expert] == expected


def test_a_layer_is_whole_when_every_matrix_has_a_copy(llama: Checkpoint, device: str) -> None:
    packed = placed(llama, device).layers[0].packed
    assert packed is not None and packed.is_whole
    packed.o = None
    assert not packed.is_whole
