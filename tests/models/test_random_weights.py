"""A shape with random weights: every family's config is enough, the same seed gives the same weights, and the
backends that support it run it and agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.backends.driver import layout_for, logits_by_prefill
from tests.models.tiny_checkpoints import cpu_variants, cuda_variants, dense_variants, make_tiny, variants

from bench.tokens_alike import read_prompt
from twostroke import LLM, SamplingParams
from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.cuda.supported import unsupported_layers
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.errors import BadRequestError, ModelError
from twostroke.models import random_weights
from twostroke.models.random_weights import KINDS, random_checkpoint
from twostroke.models.weights.tensor import WeightKind

TOKENS = list(range(3, 40))
SHAPES = Path(__file__).parents[2] / "bench" / "shapes"


def config_alone(variant: str, folder: Path) -> Path:
    source, _ = make_tiny(variant, folder / "whole")
    alone = folder / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((source / "config.json").read_text())
    return alone


@pytest.mark.parametrize("variant", variants())
def test_every_family_runs_where_it_is_supported(variant: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(config_alone(variant, tmp_path), WeightKind.Q4_1)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == checkpoint.spec.tensor_shapes()
    supporting = [factory for factory in (CPU, REFERENCE) if factory.supports(checkpoint) is None]
    assert len(supporting) == (2 if variant in cpu_variants() else 1)
    assert (unsupported_layers(checkpoint.spec) is None) == (variant in cuda_variants())
    found = []
    for factory in supporting:
        layout = layout_for(checkpoint.spec, len(TOKENS), 16)
        backend = factory.create(checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=64))
        found.append(logits_by_prefill(backend, TOKENS, [len(TOKENS)]))
        backend.close()
    assert np.isfinite(found[0]).all() and found[-1].std() > 0.05
    # By rows: where activations are rounded, a token that is about as near to two experts may go to the other one.
    difference = np.sqrt(((found[0] - found[-1]) ** 2).mean(axis=-1))
    limit = 0.25 if variant.startswith("gemma4") else 0.05  # its scores are not scaled: rounding is seen
    assert np.median(difference) < limit * found[-1].std()
    assert variant not in dense_variants() or difference.max() < 0.1 * found[-1].std()


def test_routers_are_not_quantised(tmp_path: Path) -> None:
    tensors = random_checkpoint(config_alone("mixtral", tmp_path), WeightKind.Q4_1).tensors
    assert tensors["layers.0.router"].kind is WeightKind.F32
    assert tensors["layers.0.experts.3.down"].kind is WeightKind.Q4_1


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_spread_that_keeps_activations_level(kind: WeightKind, tmp_path: Path) -> None:
    folder = config_alone("llama", tmp_path)
    one, same, other = (random_checkpoint(folder, kind, seed=seed) for seed in (1, 1, 2))
    tensor = one.tensors["layers.0.gate"]
    values = tensor.to_float32()
    assert tensor.kind is kind
    assert abs(values.std() * tensor.shape[1] ** 0.5 - 1) < 0.12
    assert abs(values.mean()) < 0.1 * values.std()
    assert one.tensors["output"].kind is (WeightKind.Q8_0 if kind.is_quantised else kind)
    assert all(np.array_equal(one.tensors[name].data, same.tensors[name].data) for name in one.tensors)
    assert not np.array_equal(tensor.data, other.tensors["layers.0.gate"].data)
    assert not np.array_equal(tensor.data, one.tensors["layers.1.gate"].data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["llama_bias", "qwen3_moe", "llama_tied"])
def test_layers_add_as_much_together_as_is_embedded(variant: str, kind: WeightKind, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(config_alone(variant, tmp_path), kind)
    spec, tensors = checkpoint.spec, checkpoint.tensors
    of_layers = 1 if spec.tied_embeddings else (2 * spec.num_layers) ** -0.5
    mlp = "layers.0.experts.0." if spec.moe else "layers.0."
    expected = {
        "embedding": spec.hidden_size**-0.5 if spec.tied_embeddings else 1,
        "layers.0.o": of_layers * tensors["layers.0.o"].shape[1] ** -0.5,
        f"{mlp}down": of_layers * tensors[f"{mlp}down"].shape[1] ** -0.5,
        f"{mlp}up": spec.hidden_size**-0.5,
    }
    if spec.layers[0].grouped.output_bias:
        expected["layers.0.o_bias"] = 0.1 * of_layers
    for name, spread in expected.items():
        assert tensors[name].to_float32().std() == pytest.approx(spread, rel=0.15), name


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_tokens_of_a_prompt_stay_apart_and_meet_all_experts(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_experts": 32, "num_experts_per_tok": 2} if variant == "qwen3_moe" else {}
    folder, _ = make_tiny(
        variant, tmp_path, num_hidden_layers=12, hidden_size=256, tie_word_embeddings=False, **experts
    )
    if_independent = 32 * (1 - (1 - 2 / 32) ** 48)
    apart = read_prompt(folder, 48)
    assert len(apart.likeness) == 12 and max(apart.likeness) < 0.2
    monkeypatch.setattr(random_weights, "_gain", lambda *_: 1.0)
    alike = read_prompt(folder, 48)
    assert alike.likeness[-1] > 0.5
    if experts:
        assert len(apart.experts_met) == 12 and min(apart.experts_met) > 0.85 * if_independent
        assert np.mean(alike.experts_met) < 0.7 * if_independent


def test_an_llm_of_random_weights_takes_token_ids_and_no_text(tmp_path: Path) -> None:
    folder = config_alone("llama", tmp_path)
    with LLM(str(folder), load="random", max_context=64) as llm:
        (result,) = llm.generate(TOKENS, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        assert len(result.token_ids) == 5 and result.text == ""
        assert llm.assembly.notes[0] == "random weights: asked for, Q4_1"
        with pytest.raises(BadRequestError, match="no tokenizer"):
            llm.generate("hello")


def test_experts_run_on_the_first_backend_that_has_them(tmp_path: Path) -> None:
    with LLM(str(config_alone("qwen3_moe", tmp_path)), load="random", max_context=64) as llm:
        (result,) = llm.generate(TOKENS, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        assert len(result.token_ids) == 5
        (note,) = [note for note in llm.assembly.notes if note.startswith("backend ")]
        assert note.startswith("backend cpu: the fastest that supports this model")


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"need a folder with config\.json"):
        random_checkpoint(tmp_path, WeightKind.Q4_1)
    with pytest.raises(ModelError, match="F32, F16, BF16, not in Q4_K"):
        random_checkpoint(config_alone("llama", tmp_path), WeightKind.Q4_K)


@pytest.mark.parametrize("config", sorted(SHAPES.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_published_shapes_are_read(config: Path) -> None:
    from twostroke.models.loading import read_folder_spec

    _, spec = read_folder_spec(config.parent)
    stated = json.loads(config.read_text())
    assert (spec.hidden_size, spec.num_layers) == (stated["hidden_size"], stated["num_hidden_layers"])
    if config.parent.name == "llama-3.2-1b":
        parameters = sum(int(np.prod(shape)) for shape in spec.tensor_shapes().values())
        assert parameters == 1_235_814_400  # as its model card counts them
