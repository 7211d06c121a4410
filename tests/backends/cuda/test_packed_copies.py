"""Which matrices get a copy for decode, what the copies take, and that they hold the layers' own weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.engines import Sizes
from tests.backends.cuda.packed_reference import unpacked
from tests.backends.cuda.tables import H200, table_of
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import matrix as matrix_module
from twostroke.backends.cuda import products
from twostroke.backends.cuda.kernels.packed_format import packed_bytes
from twostroke.backends.cuda.kernels.packed_tiles import MAX_DENSE_ROWS
from twostroke.backends.cuda.kernels.packing import PackedMatrix
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.layer_matrices import ModelMatrix
from twostroke.backends.cuda.model_matrices import sizes_of, with_copies
from twostroke.backends.cuda.products import decode_weights
from twostroke.backends.cuda.tuned_table import Choices, TableLine
from twostroke.backends.cuda.weights import Weights
from twostroke.core.formats import Formats
from twostroke.cost.model_shape import DecodeWeights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.decoder import with_attention, with_mlps
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

BF16 = torch.bfloat16
SHAPES = Path(__file__).parents[3] / "bench" / "shapes"
ALL_PACKED = Choices(table_of({"packed": (TableLine(1, 256, "packed", {"groups": 2}),)}), H200)
"""Whatever can be packed is read so, so that tiny models have copies."""
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}


def drawn(variant: str, folder: Path, **changes: Any) -> Checkpoint:
    return random_checkpoint(make_tiny(variant, folder, **{**WIDE, **changes})[0], WeightKind.BF16)


def placed(checkpoint: Checkpoint, device: str) -> Weights:
    weights, loader = Weights.placed(checkpoint, torch.device(device), BF16, ALL_PACKED)
    loader.fill(None)
    return weights


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return drawn("llama", tmp_path)


@pytest.fixture
def moe(tmp_path: Path) -> Checkpoint:
    return drawn("qwen3_moe", tmp_path, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=128)


def kinds(matrices: list[ModelMatrix], *, experts: bool = False) -> list[str]:
    return list(dict.fromkeys(matrix.kind for matrix in matrices if matrix.product.experts or not experts))


def names(checkpoint: Checkpoint, choices: Choices = ALL_PACKED) -> list[str]:
    return kinds(with_copies(checkpoint.spec, choices))


def assert_copy_of(weight: torch.Tensor, copy: PackedMatrix | None) -> None:
    assert copy is not None
    found = unpacked(copy, len(weight)).float()
    bound = weight.float().abs().amax(1, keepdim=True) * 2**-22
    assert found.shape == weight.shape and ((found - weight.float()).abs() <= bound).all()


def test_a_dense_layer_has_four_copies_of_its_own_weights(llama: Checkpoint, device: str) -> None:
    weights = placed(llama, device)
    assert weights.pack() == ()
    for matrix in weights.matrices():
        assert_copy_of(matrix.weight, matrix.packed)
        assert matrix.packed is not None and matrix.packed.is_gated == matrix.product.is_gated
        assert matrix.num_bytes == matrix.weight.nbytes + matrix.packed.num_bytes
    assert len(weights.matrices()) == 4 * 2 + 1


def test_experts_copies_are_of_all_experts(moe: Checkpoint, device: str) -> None:
    weights = placed(moe, device)
    assert weights.pack() == ()
    for layer in weights.layers:
        for matrix in (layer.mlp.gate_up, layer.mlp.down):
            copy = matrix.packed
            assert copy is not None
            for expert in range(3):
                one = PackedMatrix(copy.data[expert], copy.factors[expert], copy.is_gated)
                assert_copy_of(matrix.weight[expert], one)
        assert_copy_of(layer.mix.qkv.weight, layer.mix.qkv.packed)


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("-inf"), marks=pytest.mark.slow)])
def test_a_matrix_with_weights_that_are_not_finite_stays_plain(bad: float, moe: Checkpoint, device: str) -> None:
    weights = placed(moe, device)
    first, second = weights.layers
    second.mix.o.weight[3, 7] = bad
    first.mlp.down.weight[2, 5, 9] = bad
    weights.head.weight[1, 0] = bad
    assert weights.pack() == ("layers.0.down", "layers.1.o", "head")
    for matrix in weights.matrices():
        is_plain = matrix in (second.mix.o, first.mlp.down, weights.head)
        assert (matrix.packed is None) == is_plain and matrix.form_names == (
            ("plain",) if is_plain else ("plain", "packed")
        )


def test_what_stays_plain_by_its_shape(tmp_path: Path) -> None:
    llama = drawn("llama", tmp_path / "all")
    assert names(llama) == ["qkv", "o", "gate_up", "down", "head"]
    for biases, left in (
        ({"qkv_bias": True}, ["o", "gate_up", "down", "head"]),
        ({"output_bias": True}, ["qkv", "gate_up", "down", "head"]),
    ):
        assert names(replace(llama, spec=with_attention(llama.spec, **biases))) == left
    odd = drawn("llama", tmp_path / "odd", hidden_size=192, intermediate_size=256)
    assert names(odd) == ["down"], "three rounds of inputs are not an even number"
    for dtype, has_copies in ((BF16, True), (torch.float16, False)):
        weights = Weights.placed(odd, torch.device("cpu"), dtype, ALL_PACKED)[0]
        assert any(matrix.packed is not None for matrix in weights.matrices()) == has_copies


@pytest.mark.parametrize(
    "model, names_on_an_h200",
    [
        ("llama-3.1-8b", ["qkv", "o", "gate_up", "down", "head"]),
        ("qwen3-30b-a3b", ["gate_up", "down", "head"]),
        ("qwen3-0.6b", ["qkv", "o", "down", "head"]),
    ],
)
def test_a_copy_is_held_where_products_read_it(model: str, names_on_an_h200: list[str]) -> None:
    checkpoint, choices = random_checkpoint(SHAPES / model, WeightKind.BF16), Choices.on(H200)
    assert names(checkpoint, choices) == names_on_an_h200
    sizes = sizes_of(checkpoint, choices)
    assert isinstance(sizes, DecodeWeights)
    head = checkpoint.held_tensor_bytes("embedding" if checkpoint.spec.tied_embeddings else "output")
    assert sizes.dense is not None
    assert (sizes.dense.replaced_bytes == head) == ("qkv" not in names_on_an_h200), "beside experts the head alone"
    assert sizes.dense.plain_tokens == {"llama-3.1-8b": 0, "qwen3-30b-a3b": 8, "qwen3-0.6b": 2}[model]


@pytest.mark.parametrize("variant", ["llama", "moe"])
def test_sizes_are_those_that_are_held(variant: str, device: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(variant)
    sizes = sizes_of(checkpoint, ALL_PACKED)
    assert isinstance(sizes, DecodeWeights)
    weights, spec = placed(checkpoint, device), checkpoint.spec
    assert sizes.num_bytes == sum(matrix.packed.num_bytes for matrix in weights.matrices() if matrix.packed) > 0
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
        assert sizes.experts is not None and sizes.experts.max_tokens == 40 * 3 // 2
        assert sizes.experts.num_bytes == 2 * 3 * (packed_bytes(256, 128) + packed_bytes(128, 128))
        assert sizes.experts.replaced_bytes == 2 * 2 * 3 * 3 * 128 * 128


def test_a_device_that_cannot_says_why(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    large = random_checkpoint(SHAPES / "llama-3.1-8b", WeightKind.BF16)
    monkeypatch.setattr(products.torch.cuda, "get_device_name", lambda of: "NVIDIA H200")

    def on(capability: tuple[int, int], why_not: str | None = None) -> DecodeWeights | str:
        target = replace(target_of("cpu"), interpreted=False, capability=capability, num_sms=132)
        monkeypatch.setattr(products, "target_of", lambda device: target)
        monkeypatch.setattr(products, "why_not", lambda: why_not)
        return decode_weights(large, Formats.of("bf16"))

    assert on((9, 0)) == sizes_of(large, Choices.on(H200))
    assert on((8, 0)) == on((10, 0)) == "products with packed weights need a Hopper GPU (compute capability 9.0)"
    assert on((9, 0), "NVRTC is missing") == "products with packed weights have to be compiled, and NVRTC is missing"
    assert on((9, 0)) and decode_weights(large, Formats.of("f16")) == (
        "packed weights are bf16 in fewer bits, and this computes in f16"
    )
    assert "no matrix of this model has a size and shape" in str(decode_weights(llama, Formats.of("bf16")))


def test_a_backend_holds_copies_only_when_asked(llama: Checkpoint, device: str) -> None:
    plain = Weights.placed(llama, torch.device(device), BF16)[0]
    assert plain.pack() == () and all(matrix.packed is None for matrix in plain.matrices())
    backend = Sizes().on_device(llama, device, BF16, few_rows=None, pack_for_decode=True)
    assert "to pack copies for decode" in backend.notes[0]
    backend.close()


def test_a_rehearsal_packs_one_layer(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = placed(llama, "cpu")
    rehearsed: list[torch.Tensor] = []
    monkeypatch.setattr(matrix_module, "pack_by_kernel", lambda weight, place: rehearsed.append(weight))
    weights.rehearse_packing()
    expected = [*weights.layers[0].matrices, weights.head]
    assert [weight.data_ptr() for weight in rehearsed] == [matrix.weight.data_ptr() for matrix in expected]


def test_more_experts_than_the_kernel_has_room_for_stay_plain(moe: Checkpoint) -> None:
    assert moe.spec.moe is not None
    for experts, expected in ((256, ["gate_up", "down"]), (257, [])):
        many = with_mlps(moe.spec, [replace(moe.spec.moe, num_experts=experts)] * moe.spec.num_layers)
        assert kinds(with_copies(many, ALL_PACKED), experts=True) == expected
