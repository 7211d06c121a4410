"""Tokens that are drawn with drafts have the target's own distribution, whoever drafts: a chi-square test over many
seeded streams, which are the same in every run. That they equal the plain draws is told elsewhere; here the model's
probabilities are the witness."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pytest

from tests.speculation.oracle import Oracle
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, Drafts, PrefillChunk, RowJoin, Step
from twostroke.speculation.drafter import Drafter, Proposal
from twostroke.speculation.methods import TEXT_DRAFTERS
from twostroke.speculation.speculator import Speculator

VOCAB_SIZE = 6
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
NUM_TOKENS = 12
NUM_STREAMS = 350
LOGITS = np.random.default_rng(3).normal(0.0, 1.2, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
"""Of the token behind each token: the chain that the target is."""
LIMIT = NormalDist().inv_cdf(1 - 1e-6)


class Chain(HostBackend):
    """A target whose next token depends on the last alone, so that its distribution is known."""

    name = "chain"

    def __init__(self) -> None:
        super().__init__(KVLayout(16, (KVGroup((0,), None, 4),)), 64, VOCAB_SIZE)

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        return LOGITS[batch.token_ids[batch.logit_rows]]


@dataclass
class Guess(Oracle):
    """Guesses at random, some tokens oftener than others: what is drafted must not colour what is drawn."""

    name: str = "guess"

    def _proposal(self, seq_id: int, most: int) -> Proposal:
        tokens = tuple(self._rng.choice((0, 0, 0, 1, 2, 5)) for _ in range(most))
        return Proposal(tokens, (0.5,) * most)


def drafters() -> dict[str, Callable[[], Drafter]]:
    found = {name: make for name, make in TEXT_DRAFTERS.items() if name != "grammar"}
    return {**found, "guess": lambda: Guess({})}


def answers(drafter: Drafter | None, sampling: SamplingParams) -> tuple[list[list[int]], int]:
    """The tokens of many streams, and how many drafts held."""
    backend, rng, found, num_held = Chain(), random.Random(1), [], 0
    if drafter is not None:
        backend.use_speculator(Speculator([drafter], VOCAB_SIZE))
    for seed in range(NUM_STREAMS):
        request = Request(str(seed), PROMPT, sampling, seed=seed)
        chunk = PrefillChunk(seed, 0, PROMPT, samples=True)
        grant = BlockGrant(seed, 0, 0, (0, 1))
        first = backend.execute(Step(0, (chunk,), joins=(RowJoin(seed, request),), grants=(grant,)))
        tokens = [token.token_id for token in first.sampled[seed]]
        while len(tokens) < NUM_TOKENS:
            slot = DecodeSlot(seed, 0, None if drafter is None else Drafts(rng.randint(1, 6)))
            more = backend.execute(Step(1, decodes=(slot,))).sampled[seed]
            tokens += [token.token_id for token in more]
            num_held += len(more) - 1
        found.append(tokens[:NUM_TOKENS])
        backend.execute(Step(2, leaves=(seed,)))
    backend.close()
    return found, num_held


@cache
def plain_answers(temperature: float, top_k: int | None) -> list[list[int]]:
    return answers(None, SamplingParams(temperature=temperature, top_k=top_k))[0]


def surprise(found: Sequence[Sequence[int]], probabilities: npt.NDArray[np.float64], before: int = PROMPT[-1]) -> float:
    """By how many standard deviations chi-square over all pairs of neighbours exceeds what chance gives. `before`: what
    stands before the first."""
    pairs = Counter(pair for tokens in found for pair in zip((before, *tokens), tokens, strict=False))
    chi_square, degrees = 0.0, 0
    for last, row in enumerate(probabilities):
        total = sum(pairs[last, token] for token in range(len(row)))
        assert all(pairs[last, token] == 0 for token in np.flatnonzero(row == 0.0)), "what cannot be drawn was"
        expected = {token: total * float(share) for token, share in enumerate(row) if share * total >= 5}
        chi_square += sum((pairs[last, token] - mean) ** 2 / mean for token, mean in expected.items())
        degrees += max(0, len(expected) - 1)
    # Wilson and Hilferty: its cube root is nearly normal.
    spread = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


def probabilities_of(temperature: float, top_k: int | None = None) -> npt.NDArray[np.float64]:
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    if top_k is not None:
        weights[weights < np.sort(weights, axis=1)[:, -top_k, None]] = 0.0
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.6, 4)])
@pytest.mark.parametrize("name", drafters())
def test_the_distribution_is_the_targets(name: str, temperature: float, top_k: int | None) -> None:
    found, num_held = answers(drafters()[name](), SamplingParams(temperature=temperature, top_k=top_k))
    assert num_held > NUM_STREAMS, "drafts held, and drafts did not"
    assert surprise(found, probabilities_of(temperature, top_k)) < LIMIT
    assert found == plain_answers(temperature, top_k)


def test_the_test_can_fail() -> None:
    """A verifier that keeps one draft in twenty-five too many shows, and so does a temperature that is a little off."""
    found, rng = plain_answers(1.0, None), random.Random(2)
    coloured = [[0 if rng.random() < 0.04 else token for token in tokens] for tokens in found]
    assert surprise(found, probabilities_of(1.0)) < LIMIT < surprise(coloured, probabilities_of(1.0))
    assert surprise(found, probabilities_of(0.8)) > LIMIT
