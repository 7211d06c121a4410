"""Two and four ranks give the greedy tokens of one, and its logits but for the order of sums: every family on the
reference backend, and all that the CPU backend has there. One rank's are tested against transformers elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.driver import Driver, Logits, layout_for, logits_by_prefill
from tests.backends.sharded.thread_ranks import thread_ranks
from tests.models.tiny_checkpoints import VOCAB_SIZE, cpu_variants, make_tiny, variants

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.interface import BackendFactory, BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import ANY_FORMATS, Formats, FormatWish
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_tensors
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GatedDeltaNet, GroupedAttention, LayerSpec, Mamba2, ModelSpec
from twostroke.models.weights.tensor import WeightKind

TOLERANCE = 2e-5
"""Of the largest logit: sums of float32 in another order."""
KV_TOLERANCES = {"f16": 3e-4, "bf16": 3e-3, "int8": 3e-2}
"""The same on the CPU, by what KV is rounded to: a sum that is off by its last bit may be rounded the other way."""
QUANTISED_TOLERANCE = 3e-2
"""The same where activations are rounded to 8 bits before each product."""
SIZES = (2, 4)
MAX_CONTEXT = 64
NUM_TOKENS, NUM_MORE = 29, 6
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, VOCAB_SIZE, NUM_TOKENS)]
FEW = ("llama_tied", "llama_bias", "gemma3", "qwen3_moe_mixed", "gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v3")
FEW += ("gemma4_moe", "olmo2", "qwen3_5", "granite_hybrid", "nemotron_h", "nemotron_h_latent", "lfm2")
"""Of what the CPU has, each kind of weight, norm and state once: the others are slow, as their code is compiled."""
# Widths that ranks can share in tiles of 32: heads, and columns of an MLP.
_WIDER_KEYS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FOR_TWO: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_next_mixed", "qwen3_5", "qwen3_5_moe"), _WIDER_KEYS),
    "glm4_moe_lite": {"n_shared_experts": 2},
    "glm4v_moe": {"n_shared_experts": 2},
}
FOR_FOUR: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 8},
    "mistral": {"intermediate_size": 128},
    "gemma2": {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 12, "num_key_value_heads": 6},
    "gpt_oss": {},
    # Two KV heads, or groups of heads, that two ranks hold each.
    "olmo2": {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "nemotron_h": {"intermediate_size": 128, "moe_shared_expert_intermediate_size": 128},
    "granite_hybrid": {"hidden_size": 128, "mamba_n_heads": 16, "shared_intermediate_size": 128},
    "lfm2": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 192},
    "qwen3_next": {"linear_key_head_dim": 32, "shared_expert_intermediate_size": 128, "intermediate_size": 128},
}
FEW_FOR_FOUR = ("gemma2", "gpt_oss", "olmo2", "nemotron_h")


def settings_for(formats: Formats | str, threads: int = 1) -> BackendSettings:
    assert isinstance(formats, Formats), formats
    return BackendSettings(max_context=MAX_CONTEXT, max_tokens_per_step=32, formats=formats, threads=threads)


def greedy(backend: HostBackend, count: int) -> tuple[list[int], Logits]:
    """What follows the prompt, which is read in two chunks; and the logits of it all."""
    driver = Driver(backend, PROMPT + [0] * count)
    parts = [driver.prefill(17), driver.prefill(NUM_TOKENS - 17)]
    tokens = [int(parts[-1][-1].argmax())]
    for place in range(count):
        driver.token_ids[NUM_TOKENS + place] = tokens[-1]
        parts.append(driver.decode())
        tokens.append(int(parts[-1][-1].argmax()))
    driver.leave()
    return tokens, np.concatenate(parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpoint]]:
    """Each variant is made once, whoever asks first."""

    class Made(dict[str, Checkpoint]):
        def __missing__(self, variant: str) -> Checkpoint:
            folder: Path = tmp_path_factory.mktemp(variant)
            self[variant] = load_checkpoint(make_tiny(variant, folder)[0])
            return self[variant]

    yield Made()


def assert_alike(
    factory: BackendFactory,
    checkpoint: Checkpoint,
    sizes: tuple[int, ...],
    tolerance: float,
    wish: FormatWish,
    threads: int = 1,
) -> None:
    settings = settings_for(factory.formats(checkpoint, wish), threads)
    layout = layout_for(checkpoint.spec, NUM_TOKENS + NUM_MORE, 16)
    alone = factory.create(checkpoint, layout, settings)
    assert isinstance(alone, HostBackend)
    tokens, logits = greedy(alone, NUM_MORE)
    alone.close()
    for size in sizes:
        with thread_ranks(factory, checkpoint, size, layout, settings) as ranks:
            shared_tokens, shared_logits = greedy(ranks, NUM_MORE)
        np.testing.assert_allclose(shared_logits, logits, rtol=0, atol=tolerance * float(np.abs(logits).max()))
        assert shared_tokens == tokens, f"{size} ranks"


@pytest.mark.parametrize("variant", variants())
def test_every_family_on_the_reference(variant: str, folders: dict[str, Checkpoint]) -> None:
    assert_alike(REFERENCE, folders[variant], SIZES, TOLERANCE, ANY_FORMATS)


@pytest.mark.parametrize(("key_heads", "norm_groups"), [(2, 1), (4, 2)])
def test_value_heads_in_turns_and_uneven_ranks(key_heads: int, norm_groups: int) -> None:
    """As later GGUF files order a delta net's heads; and three ranks, of which none has as much as another."""
    delta = GatedDeltaNet(key_heads, 12, 16, 32, 4, tiled=True)
    mamba = Mamba2(10, 16, 32, 2, 4, norm_groups=norm_groups)
    attention = GroupedAttention(6, 2, 16, RopeSpec(1e4, 16), qk_norm=True, norm_spans_heads=True)
    layers = (LayerSpec(delta, DenseMlp(97)), LayerSpec(mamba, None), LayerSpec(attention, DenseMlp(97)))
    spec = ModelSpec("made_up", VOCAB_SIZE, 64, 128, layers, 1e-3)
    checkpoint = Checkpoint("made up", Path("made_up"), spec, random_tensors(spec, WeightKind.F32))
    assert_alike(REFERENCE, checkpoint, (2, 3, 4), TOLERANCE, ANY_FORMATS)


@pytest.mark.parametrize(("size", "key_heads"), [(2, 4), (4, 2)])
def test_value_heads_in_turns_on_the_cpu(size: int, key_heads: int) -> None:
    """In blocks, as files have them: what a rank has of the output projection is several runs of columns."""
    attention = GroupedAttention(4, 2, 32, RopeSpec(1e4, 32))
    delta = GatedDeltaNet(key_heads, 8, 32, 32, 4, tiled=True)
    layers = (LayerSpec(delta, DenseMlp(128)), LayerSpec(attention, DenseMlp(128)))
    spec = ModelSpec("made_up", VOCAB_SIZE, 64, 128, layers, 1e-3)
    checkpoint = Checkpoint("made up", Path("made_up"), spec, random_tensors(spec, WeightKind.Q8_0))
    assert_alike(CPU, checkpoint, (size,), QUANTISED_TOLERANCE, FormatWish(kv="f16"))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.slow)
        for name in cpu_variants()
        if name != "qwen3_5_vision"  # it is `qwen3_5` once it is loaded, and its keys are 16 wide
    ],
)
def test_two_ranks_on_the_cpu(variant: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path, **FOR_TWO.get(variant, {}))[0])
    sharper = 3 if variant.startswith("gemma4") else 1  # its scores are not scaled: what is rounded is seen
    assert_alike(CPU, checkpoint, (2,), sharper * KV_TOLERANCES["f16"], FormatWish(kv="f16"))


@pytest.mark.parametrize("variant", ["granite_hybrid", "olmo2"])
def test_ranks_of_several_threads_meet_for_norms(variant: str, folders: dict[str, Checkpoint]) -> None:
    assert_alike(CPU, folders[variant], (2,), KV_TOLERANCES["f16"], FormatWish(kv="f16"), threads=2)


@pytest.mark.parametrize("kind", KV_TOLERANCES)
def test_kinds_of_kv_on_the_cpu(kind: str, folders: dict[str, Checkpoint]) -> None:
    assert_alike(CPU, folders["gpt_oss"], (2,), KV_TOLERANCES[kind], FormatWish(kv=kind))


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in FEW_FOR_FOUR else pytest.mark.slow) for name in FOR_FOUR],
)
def test_four_ranks_on_the_cpu(variant: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path, **FOR_FOUR[variant])[0])
    assert_alike(CPU, checkpoint, (4,), KV_TOLERANCES["f16"], FormatWish(kv="f16"))


@pytest.mark.parametrize("variant", ["gpt_oss", pytest.param("phi3_partial", marks=pytest.mark.slow)])
def test_quantised_on_the_cpu(variant: str, folders: dict[str, Checkpoint]) -> None:
    """Blocks are cut between, never through: both hold the same numbers."""
    assert_alike(CPU, folders[variant], (2,), QUANTISED_TOLERANCE, FormatWish(weights="q8_0", kv="f16"))


def test_the_slow_way_to_meet_gives_the_same_bits(folders: dict[str, Checkpoint]) -> None:
    checkpoint = folders["qwen3_moe"]
    layout = layout_for(checkpoint.spec, NUM_TOKENS, 16)
    found = []
    for transport in ("shared", "relay"):
        settings = settings_for(REFERENCE.formats(checkpoint))
        with thread_ranks(REFERENCE, checkpoint, 3, layout, settings, transport) as ranks:
            found.append(logits_by_prefill(ranks, PROMPT, [20]))
    np.testing.assert_array_equal(found[0], found[1])
