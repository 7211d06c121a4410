"""What forms of weights cost on the real model, on the CPU: SmolLM2's own weights, brought to each, keep their
perplexity within a factor and mostly their likeliest tokens. The record (bench/results/form-quality.txt) has more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.kv_quality import Scores, score
from bench.made_forms import in_form
from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.engine.build import assemble
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.quantise_parts import group_of
from twostroke.models.weights.tensor import from_float32
from twostroke.text.tokenizer import Tokenizer

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
TOKENS = 240


def scored(checkpoint: Checkpoint, tokenizer: Tokenizer, form: str | None) -> Scores:
    config = EngineConfig(backend="cpu", quantise=form, max_context=TOKENS + 16)
    with LLM.from_assembly(assemble(checkpoint, tokenizer, config)) as llm:
        return score(llm, TEXT, TOKENS)


@pytest.fixture(scope="module")
def floats(smollm2: tuple[Checkpoint, Tokenizer]) -> Checkpoint:
    stored = smollm2[0]
    tensors = {name: from_float32(name, tensor.to_float32()) for name, tensor in stored.tensors.items()}
    return replace(stored, tensors=tensors)


@pytest.fixture(scope="module")
def as_it_is(smollm2: tuple[Checkpoint, Tokenizer]) -> Scores:
    return scored(*smollm2, None)


@pytest.mark.parametrize(
    ("form", "most_perplexity", "least_alike"),
    [("fp8", 1.08, 0.85), ("int8", 1.05, 0.9), ("int4", 2.0, 0.45)],
)
def test_a_form_costs_no_more_than_it_should(
    form: str,
    most_perplexity: float,
    least_alike: float,
    floats: Checkpoint,
    smollm2: tuple[Checkpoint, Tokenizer],
    as_it_is: Scores,
) -> None:
    """int4 rounds weights a second time that are stored in four bits, in groups of 64: 128 do not divide 576."""
    checkpoint, asked = (in_form(floats, form), None) if form == "int8" else (floats, form)
    found = scored(checkpoint, smollm2[1], asked)
    ratio = found.perplexity / as_it_is.perplexity
    alike = float(np.mean(found.likeliest == as_it_is.likeliest))
    moved = float(np.abs(found.log_probabilities - as_it_is.log_probabilities).mean())
    assert moved > 0.01, "nothing was rounded"
    assert 1 / 1.05 < ratio < most_perplexity, f"{ratio:.3f} times the perplexity"
    assert alike > least_alike, f"{alike:.3f} of the likeliest tokens"
    if form == "int4":
        assert group_of(checkpoint.spec.hidden_size) == 64
