"""A model that gives vectors, as an engine is built with it and as a text is brought to it: what does not go with it,
prompts before texts, vectors that are cut. Knows no HTTP."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import exp, fsum, sqrt

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.setting import shown
from twostroke.core.speculation import OFF
from twostroke.core.step_sizes import StepSizes
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.pooling import Pooling, Prompts
from twostroke.speculation.methods import methods_with_files
from twostroke.text.tokenizer import Tokenizer

VECTORS_AT_ONCE = 256
"""Texts that may run at a time unless asked otherwise: they are short, and stay for one step."""
VECTOR_SAMPLING = SamplingParams(max_tokens=1)
"""Of a request for a vector, which counts as one token."""


def with_vectors(checkpoint: Checkpoint, config: EngineConfig, *, in_fleet: bool = False) -> EngineConfig:
    """What an engine is built with where its model gives vectors: nothing drafts, and of prompts that are read whole
    nothing is found again. Raises for what has no meaning then."""
    if checkpoint.pooling is None:
        return config
    for name, source in methods_with_files(config.speculate):
        raise BadRequestError(f"--speculate {name}:{source} is of no use: this model gives vectors, and writes nothing")
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
    what = "a score of a pair of texts" if pooling.scores else f"vectors of {pooling.dimensions} numbers"
    states = "the mean of all states" if pooling.states == "mean" else f"the {pooling.states} token's state"
    steps = f", through {len(pooling.steps)} matrices" if pooling.steps else ""
    ends = ", normalised" if pooling.normalises else ""
    whole = "; each text is read in one step" if reads_whole(checkpoint) else ""
    return f"{what}: {states}{steps}{ends}{whole}"


def prompt_of(prompts: Prompts, name: str | None) -> str:
    """What stands before a text: the prompt of this name, or the model's default, or nothing."""
    if name is None:
        return "" if prompts.default is None else prompts.by_name[prompts.default]
    if name not in prompts.by_name:
        known = ", ".join(prompts.by_name) or "none"
        raise BadRequestError(f"prompt_name is {shown(name)}; this model's prompts are: {known}")
    return prompts.by_name[name]


def check_dimensions(dimensions: int | None, most: int, shorter: Sequence[int]) -> None:
    """Raise unless vectors may be cut to it. `shorter`: what the model names; none: anything."""
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= most:
        raise BadRequestError(f"dimensions must be from 1 to this model's {most}, not {shown(dimensions)}")
    if shorter and dimensions not in (*shorter, most):
        known = ", ".join(map(str, sorted({*shorter, most})))
        raise BadRequestError(f"dimensions is {dimensions}; this model was trained for {known}")


def vector_of(raw: bytes, dimensions: int | None = None) -> array[float]:
    """The numbers of an event's vector; the first `dimensions` of them, brought to length 1 again."""
    numbers = array("f", raw)
    if array("H", [1]).tobytes() != b"\x01\x00":
        numbers.byteswap()
    if dimensions is None or dimensions >= len(numbers):
        return numbers
    cut = numbers[:dimensions]
    length = sqrt(fsum(number * number for number in cut))
    return array("f", [number / max(length, 1e-12) for number in cut])


def truncated(ids: Sequence[int], limit: int | None, prefix: Sequence[int], suffix: Sequence[int]) -> tuple[int, ...]:
    """A text's tokens within their frame: as many of the first as `limit` has room for; None: all of them."""
    room = len(ids) if limit is None else max(0, limit - len(prefix) - len(suffix))
    return (*prefix, *ids[:room], *suffix)


def pair_of(tokenizer: Tokenizer, query: str, document: str, limit: int | None = None) -> tuple[tuple[int, ...], int]:
    """Two texts as a reranker reads them together, and the token that the second begins at. `limit`: the document is
    cut at its end where they have more tokens together."""
    first = tokenizer.encode(query, add_special_tokens=False)
    second = tokenizer.encode(document, add_special_tokens=False)
    return joined_pair(tokenizer, first, second, limit)


def joined_pair(
    tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int], limit: int | None = None
) -> tuple[tuple[int, ...], int]:
    before, between, behind = tokenizer.pair_frame
    start = len(before) + len(first) + len(between)
    room = len(second) if limit is None else max(0, limit - start - len(behind))
    return (*before, *first, *between, *second[:room], *behind), start


def score_of(raw: bytes) -> float:
    """Of a reranker's one number, between 0 and 1: how sure it is that a document answers a query."""
    (logit,) = vector_of(raw)
    return 1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))
