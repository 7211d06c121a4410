"""Which rope factors a model with two sets reads prompts with: as transformers does up to the length that the short
ones were trained for; beyond it when a longer context is asked for, which is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.tiny_checkpoints import MAX_CONTEXT, ORIGINAL_CONTEXT, VOCAB_SIZE, make_tiny, transformers_logits
from transformers import PreTrainedModel

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import assemble
from twostroke.engine.offline import LLM
from twostroke.models.loading import load_checkpoint

Tiny = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("phi3_longrope", tmp_path_factory.mktemp("phi3"))


def engine(tiny: Tiny, backend: str, max_context: int | None) -> LLM:
    quantise = "none" if backend == "cpu" else None
    kv = KVConfig(kind="f16") if backend == "cpu" else KVConfig()
    config = EngineConfig(backend=backend, max_context=max_context, quantise=quantise, kv=kv)
    return LLM.from_assembly(assemble(load_checkpoint(tiny[0]), None, config))


def tokens(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(6, VOCAB_SIZE, count)]


def furthest(llm: LLM, tiny: Tiny, count: int) -> float:
    """Nats between ours and transformers' logprobs of a prompt's tokens, at worst."""
    prompt = tokens(count)
    result = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    ours = np.array([entry.logprob for entry in result.prompt_logprobs])
    theirs = torch.log_softmax(torch.from_numpy(transformers_logits(tiny[1], prompt)), dim=-1).numpy()
    return float(np.abs(ours - theirs[np.arange(count - 1), prompt[1:]]).max())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_short_prompt_is_read_as_transformers_reads_it(tiny: Tiny, backend: str) -> None:
    with engine(tiny, backend, None) as llm:
        assert llm.assembly.resolved.max_context == ORIGINAL_CONTEXT
        assert furthest(llm, tiny, 40) < 0.02
        assert any("short rope factors" in note and "--max-context" in note for note in llm.assembly.notes)
        assert llm.assembly.resolved.warnings == ()
    with engine(tiny, backend, ORIGINAL_CONTEXT // 2 + 16) as llm:
        assert furthest(llm, tiny, 40) < 0.02


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_longer_context_is_asked_for_and_said(tiny: Tiny, backend: str) -> None:
    with engine(tiny, backend, MAX_CONTEXT) as llm:
        assert furthest(llm, tiny, ORIGINAL_CONTEXT + 30) < 0.02
        [warning] = llm.assembly.resolved.warnings
        assert f"above {ORIGINAL_CONTEXT}, so every prompt is read with them" in warning
        assert warning in llm.assembly.notes
        assert furthest(llm, tiny, 40) > 1.0, "what the warning says is true"


def test_a_model_with_one_set_of_factors_has_its_whole_context(tmp_path: Path) -> None:
    spec = load_checkpoint(make_tiny("llama", tmp_path)[0]).spec
    assert spec.short_rope_context is None and spec.max_context == MAX_CONTEXT
