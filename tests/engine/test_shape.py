"""The numbers of a checkpoint: SmolLM2-135M's dimensions in the kinds of its GGUF file, and an untied model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twostroke import backends
from twostroke.core.formats import Formats
from twostroke.cost.floor import decode_floor_s, prefill_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ExpertsShape, KVGroupShape
from twostroke.engine.formats import Choice
from twostroke.engine.shape import shape_of
from twostroke.machine import MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LatentAttention, LayerSpec, ModelSpec, MoeSpec
from twostroke.models.weights.tensor import WeightKind, WeightTensor

LAYER = LayerSpec(GroupedAttention(9, 3, 64, RopeSpec(theta=10_000.0, dim=64)), DenseMlp(1536))
SMOLLM2 = ModelSpec(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    max_context=8192,
    layers=(LAYER,) * 30,
    norm_eps=1e-5,
    tied_embeddings=True,
)


def checkpoint_of(spec):
    """Every tensor at its true size, without the memory: one zero byte, seen many times."""
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        kind = WeightKind.F32 if len(shape) == 1 else WeightKind.Q8_0 if name == "embedding" else WeightKind.Q4_1
        rows = shape[0] if len(shape) == 2 else 1
        data = np.broadcast_to(np.zeros(1, dtype=np.uint8), (rows, kind.row_bytes(shape[-1])))
        tensors[name] = WeightTensor(name, kind, shape, data)
    return Checkpoint("model", Path("model.gguf"), spec, tensors)


def test_smollm2():
    shape = shape_of(checkpoint_of(SMOLLM2), [23_040])
    assert shape.num_parameters == 134_515_008
    assert shape.layer_matmul_parameters == 106_168_320
    assert shape.head_matmul_parameters == 28_311_552
    # 106,168,320 x 20 / 32 in Q4_1, 28,311,552 x 34 / 32 in Q8_0, 61 norms of 576 in F32.
    assert shape.weight_bytes_per_step == 66_355_200 + 30_081_024 + 140_544
    assert (shape.num_heads, shape.head_dim) == (9, 64)
    assert shape.kv_groups == (KVGroupShape(30, None, 23_040, pair_multiply_adds=30 * 2 * 9 * 64),)


def test_an_untied_table_is_gathered_not_read():
    tied = shape_of(checkpoint_of(SMOLLM2), [1])
    untied = shape_of(checkpoint_of(replace(SMOLLM2, tied_embeddings=False)), [1])
    assert untied.num_parameters - tied.num_parameters == 28_311_552
    assert untied.head_matmul_parameters == tied.head_matmul_parameters
    assert untied.layer_matmul_parameters == tied.layer_matmul_parameters
    # The Q8_0 table gives way to a Q4_1 head.
    assert untied.weight_bytes_per_step == 66_355_200 + 28_311_552 * 20 // 32 + 140_544


def test_windowed_layers_are_a_group_of_their_own():
    windowed = replace(LAYER, attention=replace(LAYER.grouped, window=512))
    spec = replace(SMOLLM2, layers=(windowed, LAYER, windowed))
    shape = shape_of(checkpoint_of(spec), [768, 1536])
    a_layer = 2 * 9 * 64
    full, windowed = KVGroupShape(1, None, 768, pair_multiply_adds=a_layer), KVGroupShape(2, 512, 1536)
    assert shape.kv_groups == (full, replace(windowed, pair_multiply_adds=2 * a_layer))
    with pytest.raises(ValueError, match="zip"):
        shape_of(checkpoint_of(spec), [768])


def test_a_token_meets_only_its_experts():
    """Qwen3-30B-A3B: 30.5 billion parameters, of which a token meets 3.3 (its embedding table among them)."""
    attention = GroupedAttention(32, 4, 128, RopeSpec(theta=1e6, dim=128), qk_norm=True)
    layer = LayerSpec(attention, MoeSpec(num_experts=128, experts_per_token=8, expert_intermediate_size=768))
    spec = replace(
        SMOLLM2,
        vocab_size=151_936,
        hidden_size=2048,
        layers=(layer,) * 48,
        tied_embeddings=False,
    )
    shape = shape_of(checkpoint_of(spec), [1])
    assert shape.num_parameters == 30_532_122_624
    an_expert, head = 3 * 2048 * 768, 151_936 * 2048
    attended = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048
    assert shape.layer_matmul_parameters == 48 * (attended + 128 * 2048 + 8 * an_expert)
    assert shape.experts == ExpertsShape(128, 8, 48 * 128 * an_expert * 20 // 32, 48 * 128 * an_expert)
    assert shape.experts.active_parameters == 48 * 8 * an_expert
    vectors = 4 * (48 * (2 * 2048 + 2 * 128) + 2048)
    always = (48 * (attended + 128 * 2048) + head) * 20 // 32 + vectors
    assert shape.weight_bytes_per_step == always
    assert shape.weight_bytes_read(1) == pytest.approx(always + 48 * 8 * an_expert * 20 / 32)
    ceilings = Ceilings(read_bytes_per_s=1e12, multiply_adds_per_s=1e12, source="a test")
    assert decode_floor_s(shape, 1, ceilings) == pytest.approx((shape.weight_bytes_read(1) + 1) / 1e12)
    # A long prompt is bound by arithmetic with what its tokens meet, a short one by the experts it is likely to touch.
    met = shape.layer_matmul_parameters * 4096 + shape.head_matmul_parameters + shape.attention_multiply_adds(0, 4096)
    assert prefill_floor_s(shape, 0, 4096, ceilings) == pytest.approx(met / 1e12)
    fast = replace(ceilings, multiply_adds_per_s=1e18)
    assert prefill_floor_s(shape, 0, 4, fast) == pytest.approx(shape.weight_bytes_read(4) / 1e12)


@pytest.mark.parametrize(("backend", "kv"), [("reference", "f32"), ("cpu", "f16"), ("cuda", "bf16")])
def test_a_latent_chunk_costs_what_the_backend_does(backend, kv):
    """On a card queries go to the latents before their chunk; on hosts those are expanded, whatever that takes."""
    attention = LatentAttention(8, 512, 128, 64, 128, RopeSpec(theta=10_000.0, dim=64))
    spec = replace(SMOLLM2, layers=(LayerSpec(attention, DenseMlp(1536)),) * 2)
    factory = backends.load_factory(backend)
    choice = Choice(
        checkpoint_of(spec), factory, "asked for", Formats("f32", "f32", kv), factory.suits, MemorySpace("", 1, 1, 1.0)
    )
    expanded, absorbed, expansion = 8 * (192 + 128), 8 * (576 + 512), 8 * 256 * 512
    own, before, length = 4 * 5 // 2, 4 * 3000, 4
    found = choice.shape.expected_attention_multiply_adds(3000, length, is_chunk=True)
    if backend == "cuda":
        assert found == 2 * (expanded * own + absorbed * before + expansion * length)
    else:
        assert found == 2 * (expanded * (own + before) + expansion * 3000)
