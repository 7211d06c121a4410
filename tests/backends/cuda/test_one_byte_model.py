"""Whole models that keep K and V in a byte a number: they say what the reference says whose store rounds alike. Chunks
behind stored context, prefixes that were read before, drafts, tiers, and what it takes in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, play, request
from tests.backends.cuda.test_drafts import Told, advances, engine_with
from tests.backends.cuda.test_kept_blocks import tiered
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY
from twostroke.backends.cuda.kv_codes import has_scales_for
from twostroke.backends.interface import Backend
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.core.step import BlockCopy, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.quantised.scheme import KVScheme, Matching, NameList, Quantisation
from twostroke.models.weights.quantised_folder import KVScales

SIZES = Sizes(step_tokens=16, max_rows=3, max_context=64)
LARGEST = {"fp8": 448.0, "int8": 127.0}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
VARIANTS = {
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2},  # windows, soft caps
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": SLIDING_AND_FULL,
        "num_kv_shared_layers": 2,
    },  # heads of two sizes
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("models")
    return {name: load_checkpoint(make_tiny(name, folder / name, **changes)[0]) for name, changes in VARIANTS.items()}


def rounding(checkpoint: Checkpoint, sizes: Sizes, kind: str) -> Backend:
    """The reference, which keeps what a byte a number leaves of keys and values."""
    backend = sizes.on_reference(checkpoint)
    assert isinstance(backend, ReferenceBackend)
    write, most, scales = backend.model.kv.write, LARGEST[kind], checkpoint.kv_scales

    def rounded(layer: int, slots: np.ndarray, *parts: np.ndarray) -> None:
        left = []
        for part, given in zip(parts, (scales.keys, scales.values) if scales else (None, None), strict=True):
            values = torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
            own = values.abs().amax(-1, keepdim=True) / most
            scale = own.clamp(min=2.0**-100) if given is None else torch.from_numpy(given[layer])[None, :, None]
            codes = (values / scale).clamp(-most, most)
            codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()
            left.append((codes * scale).numpy())
        write(layer, slots, *left)

    backend.model.kv.write = rounded  # type: ignore[method-assign]
    return backend


def assert_alike(found: Answers, expected: Answers, within: float = 0.02) -> None:
    """Where both say the same they are as sure of it: a number that lies between two goes to either."""
    assert found.tokens == expected.tokens
    for name, steps in expected.logprobs.items():
        for step, other in zip(steps, found.logprobs[name], strict=True):
            assert abs(step.logprob - other.logprob) < within


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("llama", "fp8"), ("gemma2", "int8"), *(
        pytest.param(variant, kind, marks=pytest.mark.slow)
        for variant, kind in (
            ("llama", "int8"), ("gemma2", "fp8"), ("gpt_oss", "fp8"), ("gpt_oss", "int8"), ("gemma4", "fp8"),
        )
    )],
)  # fmt: skip
def test_a_model_says_what_the_rounding_reference_says(
    models: dict[str, Checkpoint], variant: str, kind: str, device: str
) -> None:
    """Prompts longer than a step, so that chunks read what is stored, and one with a prefix that was read before."""
    checkpoint = models[variant]
    requests = mixed_requests([5, 34, 20], [4, 3, 3, 2], ignore_eos=True, logprobs=1)
    engine = SIZES.engine(checkpoint, SIZES.on_device(checkpoint, device, kv=kind))
    found = play(engine, requests)
    assert engine.scheduler.counts().prefix_hit_tokens > 0
    plain = play(SIZES.engine(checkpoint, SIZES.on_reference(checkpoint)), requests)
    assert_alike(found, play(SIZES.engine(checkpoint, rounding(checkpoint, SIZES, kind)), requests))
    differing = [
        abs(one.logprob - other.logprob)
        for name, steps in plain.logprobs.items()
        for one, other in zip(steps, found.logprobs[name], strict=False)
    ]
    assert max(differing) > 1e-4, "the reference without rounding says otherwise: bytes were read"


def with_scales(checkpoint: Checkpoint, kind: str, by_head: bool, is_dynamic: bool = False) -> Checkpoint:
    """As a checkpoint is read whose makers measured what its keys and values are: some are larger still."""
    rng, layers = np.random.default_rng(3), checkpoint.spec.layers

    def scales() -> dict[int, np.ndarray]:
        sizes = [one.grouped.num_kv_heads if by_head else 1 for one in layers]
        return {
            layer: rng.uniform(0.3, 1.0, size).astype(np.float32) / LARGEST[kind] for layer, size in enumerate(sizes)
        }

    quantisation = Quantisation(
        "test", "config.json", (), NameList((), Matching.EXACT), kv=KVScheme(kind, by_head, is_dynamic)
    )
    return replace(checkpoint, kv_scales=KVScales(scales(), scales()), quantisation=quantisation)


@pytest.mark.parametrize(("kind", "by_head"), [("fp8", False), pytest.param("int8", True, marks=pytest.mark.slow)])
def test_scales_of_the_checkpoint_are_taken(
    models: dict[str, Checkpoint], kind: str, by_head: bool, device: str
) -> None:
    checkpoint = with_scales(models["llama"], kind, by_head)
    chosen = FACTORY.formats(checkpoint, FormatWish(kv=kind))
    assert isinstance(chosen, Formats) and f"KV in {kind} by the scales of the checkpoint" in chosen.line
    requests = mixed_requests([5, 34], [3, 3, 2], ignore_eos=True, logprobs=1)
    backend = SIZES.on_device(checkpoint, device, kv=kind)
    assert backend.block_format.groups[0].element == f"{kind} and a scale of a head"
    found = play(SIZES.engine(checkpoint, backend), requests)
    assert_alike(found, play(SIZES.engine(checkpoint, rounding(checkpoint, SIZES, kind)), requests))


def test_whose_scales_they_are(models: dict[str, Checkpoint]) -> None:
    """Scales for float8 say nothing of int8, and what is found as it is stored needs none."""
    for_fp8 = with_scales(models["llama"], "fp8", by_head=True)
    assert has_scales_for(for_fp8, "fp8") and not has_scales_for(for_fp8, "int8")
    assert not has_scales_for(models["llama"], "fp8")
    assert not has_scales_for(with_scales(models["llama"], "fp8", by_head=False, is_dynamic=True), "fp8")
    assert has_scales_for(replace(for_fp8, quantisation=None), "fp8"), "as files had it that said nothing of it"


@pytest.mark.slow
def test_drafts_are_verified_over_it(models: dict[str, Checkpoint], device: str) -> None:
    checkpoint, sizes = models["llama"], Sizes(step_tokens=40, max_rows=4, max_context=64, num_blocks=20)
    requests = mixed_requests((3, 19, 1), (12, 9, 10, 7), ignore_eos=True)
    plain = play(sizes.engine(checkpoint, sizes.on_device(checkpoint, device, kv="fp8")), requests)
    backend = sizes.on_device(checkpoint, device, kv="fp8")
    engine, steps = engine_with(sizes, checkpoint, backend, Told(plain))
    assert_alike(play(engine, requests), plain)
    assert advances(steps) >= {1, 2, 3}


@pytest.mark.parametrize("kind", LARGEST)
def test_blocks_move_with_their_scales(models: dict[str, Checkpoint], kind: str, device: str) -> None:
    checkpoint = models["gemma2"]
    backend = SIZES.on_device(checkpoint, device, kv=kind)
    form = backend.block_format.groups[0]
    own = checkpoint.spec.layers[form.layers[0]].grouped
    a_layer = 2 * own.num_kv_heads * SIZES.block_size * (own.head_dim + 4)
    assert (form.num_bytes, form.element) == (len(form.layers) * a_layer, f"{kind} and a scale of a token and head")
    counted = FACTORY.kv_bytes_per_token(checkpoint, form.layers, Formats("bf16", "bf16", kind))
    assert counted * SIZES.block_size == form.num_bytes, "as the ledger counts it"
    others = {SIZES.on_device(checkpoint, device, kv=other).block_format.digest() for other in (None, *LARGEST)}
    assert len(others) == 3 and backend.block_format.digest() in others, "bytes are taken in where they mean the same"
    for parts in backend._kv.parts:
        for part in parts:
            part.copy_(torch.randint(0, 255, part.shape))
    kept = backend.keep_blocks([4, 4])
    before, after = (memoryview(bytearray(2 * form.num_bytes)) for _ in range(2))
    backend.read_blocks(0, [3, 5], before)
    kept.start(Step(0, spills=(BlockCopy(0, 3, 1), BlockCopy(0, 5, 2))))
    kept.start(Step(1, loads=(BlockCopy(0, 8, 1), BlockCopy(0, 9, 2))))
    backend.read_blocks(0, [8, 9], after)
    assert before == after and kept.view(0, 1) == before[: form.num_bytes]
    backend.write_blocks(0, [10, 11], before)
    backend.read_blocks(0, [10, 11], after)
    assert before == after


@pytest.mark.slow
def test_an_engine_with_tiers_says_what_one_without_says(models: dict[str, Checkpoint], device: str) -> None:
    checkpoint, sizes = models["gemma2"], Sizes(step_tokens=16, max_rows=2, max_context=48, num_blocks=4)
    prompts = [[number * 7 + place for place in range(34)] for number in (1, 2, 1, 3, 2, 1)]
    requests = [request(f"r{number}", prompt, max_tokens=3) for number, prompt in enumerate(prompts)]
    answers = []
    for slots in (0, 20):
        backend = sizes.on_device(checkpoint, device, kv="int8")
        engine = tiered(checkpoint, backend, sizes.layout(checkpoint), slots)
        answers.append(play(engine, requests).tokens)
        assert (engine.scheduler.counts().tier_hit_tokens.host > 0) == bool(slots)
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", LARGEST)
def test_it_is_chosen_where_it_is_asked_for(models: dict[str, Checkpoint], kind: str) -> None:
    checkpoint = models["llama"]
    own = checkpoint.spec.layers[0].grouped
    chosen = FACTORY.formats(checkpoint, FormatWish(kv=kind))
    assert isinstance(chosen, Formats) and (chosen.arithmetic, chosen.kv) == ("bf16", kind)
    assert f"KV in {kind} with a scale for each token and head" in chosen.line
    found = FACTORY.kv_bytes_per_token(checkpoint, (0, 1), chosen)
    assert found == 2 * 2 * own.num_kv_heads * (own.head_dim + 4)
    given = with_scales(checkpoint, kind, by_head=False)
    assert FACTORY.kv_bytes_per_token(given, (0, 1), chosen) == 2 * own.kv_values
    for weights in ("fp8", "int4"):
        both = FACTORY.formats(checkpoint, FormatWish(weights, kv=kind))
        assert isinstance(both, Formats) and (both.weights, both.kv) == (weights, kind)
    for wish in (FormatWish(arithmetic="f16", kv=kind), FormatWish("f16", kv=kind)):
        assert FACTORY.formats(checkpoint, wish) == f"KV in {kind} is multiplied in bf16: it does not go with f16"
    assert isinstance(FACTORY.formats(checkpoint, FormatWish(STORED, kv=kind)), Formats)


def test_latents_have_16_bits(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("deepseek_v2_lite", tmp_path, num_hidden_layers=1)[0])
    assert FACTORY.formats(checkpoint, FormatWish(kv="fp8")) == "it keeps latents in 16 bits, not in fp8"
