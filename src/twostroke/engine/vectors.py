"""A model that gives vectors, as an engine is built with it: what does not go with it, and what a user is told."""

from __future__ import annotations

from dataclasses import replace

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.speculation import OFF
from twostroke.core.step_sizes import StepSizes
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.pooling import Pooling, States
from twostroke.speculation.methods import computing_methods

VECTORS_AT_ONCE = 256
"""Texts that may run at a time unless asked otherwise: they are short, and stay for one step."""


_WORDS: dict[States, str] = {
    "first": "the first token's state",
    "last": "the last token's state",
    "mean": "the mean of all states",
    "max": "the largest of all states",
    "root_mean": "the sum of all states by the root of their count",
    "weighted_mean": "the mean of all states, the later the heavier",
}


def with_vectors(checkpoint: Checkpoint, config: EngineConfig, *, in_fleet: bool = False) -> EngineConfig:
    """What an engine is built with where its model gives vectors: nothing drafts, and of prompts that are read whole
    nothing is found again. Raises for what has no meaning then."""
    if checkpoint.pooling is None:
        return config
    for method in computing_methods(config.speculate):
        raise BadRequestError(f"--speculate {method} is of no use: this model gives vectors, and writes nothing")
    if config.tensor_parallel != 1:
        raise BadRequestError("--tensor-parallel does not go with a model that gives vectors yet")
    if in_fleet:
        raise BadRequestError("--role does not go with a model that gives vectors: there is nothing to hand on")
    finds_prefixes = config.kv.prefix_caching and not reads_whole(checkpoint)
    return replace(config, speculate=OFF, kv=replace(config.kv, prefix_caching=finds_prefixes))


def reads_whole(checkpoint: Checkpoint) -> bool:
    """Whether a prompt is computed in one step: tokens see those behind them, or the states of all are pooled."""
    return checkpoint.pooling is not None and (checkpoint.pooling.reads_whole or not checkpoint.spec.is_causal)


def sizes_for(checkpoint: Checkpoint, suits: StepSizes) -> StepSizes:
    if checkpoint.pooling is None:
        return suits
    return replace(suits, max_running=max(suits.max_running, VECTORS_AT_ONCE))


def vectors_note(checkpoint: Checkpoint, pooling: Pooling) -> str:
    facts = pooling.facts
    what = "a score of a pair of texts" if facts.scores else f"vectors of {facts.dimensions} numbers"
    states = " beside ".join(_WORDS[kind] for kind in pooling.all_states)
    steps = f", through {len(pooling.steps)} matrices" if pooling.steps else ""
    ends = ", normalised" if pooling.normalises else ""
    whole = "; each text is read in one step" if reads_whole(checkpoint) else ""
    return f"{what}: {states}{steps}{ends}{whole}"
