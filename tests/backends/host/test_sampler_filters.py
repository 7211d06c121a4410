"""Each sampling parameter's distribution against transformers' own processors, and against plain Python."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.properties import examples
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twostroke.backends.host.sampler import PART, RowSampler, candidates, choose, draw
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams

VOCAB = 5000
PROMPT = (3, 17, 17, 256, 4000)
OUTPUT = (9, 17, 9, 9, 4999)


def logits_of(seed, size=VOCAB):
    return (4 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def probabilities(sampling, logits, prompt=PROMPT, output=OUTPUT, eos=()):
    """The whole distribution that a row draws from, [vocab]."""
    request = Request("r", prompt, sampling, eos_token_ids=frozenset(eos))
    scores = RowSampler(request, 0, output, len(logits)).scores(logits)
    ids, weights = candidates(scores, sampling)
    dense = np.zeros(len(logits))
    dense[ids] = weights / weights.sum()
    return dense


def oracle(processors, logits, prompt=PROMPT, output=OUTPUT):
    ids = torch.tensor([[*prompt, *output]])
    scores = LogitsProcessorList(processors)(ids, torch.from_numpy(logits).double()[None])
    return torch.softmax(scores[0], dim=-1).numpy()


CASES = {
    "plain": ({}, []),
    "hot": ({"temperature": 1.7}, [TemperatureLogitsWarper(1.7)]),
    "cold": ({"temperature": 0.05}, [TemperatureLogitsWarper(0.05)]),
    "top_k 1": ({"top_k": 1}, [TopKLogitsWarper(1)]),
    "top_k 40": ({"top_k": 40}, [TopKLogitsWarper(40)]),
    "top_k 3000": ({"top_k": 3000}, [TopKLogitsWarper(3000)]),
    "top_k beyond": ({"top_k": 10**9}, [TopKLogitsWarper(10**9)]),
    "top_p 0.9": ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
    "top_p 0.999, hot": ({"top_p": 0.999, "temperature": 5.0}, [TemperatureLogitsWarper(5.0), TopPLogitsWarper(0.999)]),
    "top_p tiny": ({"top_p": 1e-9}, [TopPLogitsWarper(1e-9)]),
    "min_p": ({"min_p": 0.02}, [MinPLogitsWarper(0.02)]),
    "min_p 1": ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition rewards": ({"repetition_penalty": 0.6}, [RepetitionPenaltyLogitsProcessor(0.6)]),
    "all": (
        {"temperature": 1.4, "top_k": 200, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.2},
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(200),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.001),
        ],
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_distribution_is_that_of_transformers(case, seed):
    parameters, processors = CASES[case]
    logits = logits_of(seed)
    ours, theirs = probabilities(SamplingParams(**parameters), logits), oracle(processors, logits)
    assert np.array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers(num_output):
    logits, output, stops = logits_of(1), OUTPUT[:num_output], (5, 7, 4321)
    sampling = SamplingParams(min_tokens=3, stop_token_ids=(7, 4321))
    theirs = oracle([MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, list(stops))], logits, output=output)
    ours = probabilities(sampling, logits, output=output, eos=(5,))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-12)
    assert (ours[list(stops)] == 0).all() == (num_output < 3)


@given(
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 49), max_size=90),
    bias=st.dictionaries(st.integers(0, 49), st.floats(-100, 100), max_size=5),
)
def test_scores_follow_the_formulas(presence, frequency, repetition, prompt, output, bias):
    """OpenAI: logit - count * frequency - (count > 0) * presence, over the output; repetition over all; bias first."""
    logits = logits_of(2, 50)
    sampling = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    grown = RowSampler(Request("r", tuple(prompt), sampling), 0, tuple(output), 50).scores(logits)
    counts = Counter(output)
    for token_id in range(50):
        expected = float(logits[token_id]) + bias.get(token_id, 0.0)
        if token_id in counts or token_id in prompt:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= counts[token_id] * frequency + (counts[token_id] > 0) * presence
        assert math.isclose(grown[token_id], expected, rel_tol=1e-5, abs_tol=1e-4)


@examples(200)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 7, 100, 3000]),
    levels=st.sampled_from([1, 3, 40, 10**6]),
    temperature=st.floats(0.05, 5),
    top_k=st.one_of(st.none(), st.integers(1, 4000)),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_kept_tokens_are_those_of_a_full_sort(seed, size, levels, temperature, top_k, top_p, min_p):
    """Plain Python over the total order (score down, id up); few levels make many ties."""
    logits = (np.random.default_rng(seed).integers(0, levels, size) * (12 / levels)).astype(np.float32)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = candidates(logits, sampling)

    ranked = sorted(range(size), key=lambda i: (-logits[i], i))[:top_k]
    mass = [math.exp((float(logits[i]) - float(logits[ranked[0]])) / temperature) for i in ranked]
    running = np.cumsum(mass) / math.fsum(mass)
    # A border within rounding of top_p may fall to either side.
    fewest, most = (int(np.searchsorted(running, top_p + error)) + 1 for error in (-1e-9, 1e-9))
    clearly = [i for i, weight in zip(ranked[:fewest], mass, strict=False) if weight >= min_p * (1 + 1e-9)]
    possibly = [i for i, weight in zip(ranked[: max(most, 1)], mass, strict=False) if weight >= min_p * (1 - 1e-9)]
    kept = ids.tolist()
    assert kept == sorted(kept)
    assert set(clearly) <= set(kept) <= set(possibly)
    assert ranked[0] in kept
    by_id = dict(zip(ranked, mass, strict=True))
    np.testing.assert_allclose(weights, [by_id[i] for i in kept], rtol=1e-9)


@examples(200)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 511, 512, 513, 1500]),
    zeros=st.floats(0, 0.99),
    number=st.floats(0, 1, exclude_max=True),
)
def test_draw_inverts_the_cumulative_distribution(seed, size, zeros, number):
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(size) < zeros, 0.0, rng.random(size) ** 4)
    weights[rng.integers(size)] = 1.0
    index = draw(weights, number)
    assert weights[index] > 0
    total = math.fsum(weights)
    below, above = math.fsum(weights[:index]) / total, math.fsum(weights[: index + 1]) / total
    assert below - 1e-12 <= number <= above + 1e-12


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_draw_at_the_ends_skips_weightless_tokens(number):
    weights = np.zeros(2000)
    weights[[600, 1300]] = 0.1, 0.3
    assert draw(weights, number) == (600 if number == 0.0 else 1300)


@pytest.mark.parametrize("vocab_size", [1, 511, 512, PART - 1, PART, PART + 1, 49152, 3 * PART + 700])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0])
def test_a_draw_in_parts_is_one_from_all_weights(vocab_size: int, temperature: float) -> None:
    """Also where most tokens are forbidden, and for numbers at both ends."""
    generator = np.random.default_rng(vocab_size)
    scores = generator.normal(scale=4, size=vocab_size).astype(np.float32)
    scores[generator.random(vocab_size) < 0.3] = -np.inf
    scores[-1] = 5.0
    weights = np.exp((scores.astype(np.float64) - float(scores.max())) / temperature)
    for number in (0.0, *generator.random(40).tolist(), 1.0 - 2.0**-53):
        token_id = choose(scores, SamplingParams(temperature=temperature), number)
        assert token_id == draw(weights, number)
        assert np.isfinite(scores[token_id])
