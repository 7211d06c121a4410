"""Choosing a token from logits: the reference that every backend agrees with. Knows one row; nothing of the batch.

Order: logit bias; repetition, then presence and frequency penalties; tokens outside the grammar masked, and stop ids
below min_tokens; then the highest score (greedy), or temperature, top-k, top-p, min-p and one draw. Equal scores rank
by token id, the lowest first.
Logprobs are of the model's own distribution: log-softmax of the raw logits, before bias, penalties and temperature."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.penalties import SeenTokens
from twostroke.backends.host.random_stream import uniform
from twostroke.core.grammar import TokenMatcher
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import SampledToken, TokenLogprobs

Scores = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]

COLUMN_HEIGHT = 32
"""Top-k looks at the best score of each group of this many first."""
NUM_BUCKETS = 1024
SMALLEST_SPREAD = 1e-30
DRAW_BLOCK = 512
"""Weights are summed in blocks, then inside one block."""


class RowSampler:
    """One row's sampling: its parameters, and the state that moves by one token with each `sample`. A row rebuilt from
    the tokens it has written continues as if it had never stopped."""

    def __init__(
        self,
        request: Request,
        sample_index: int,
        output_token_ids: tuple[int, ...],
        vocab_size: int,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """`matcher` is at the beginning of the answer, and this row's from now on."""
        sampling = request.sampling
        self._sampling = sampling
        self._seed = request.seed
        self._sample_index = sample_index
        self._num_output = len(output_token_ids)
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.intp)
        self._bias_values = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
        # A model may declare an end-of-text id beyond its logits; it can never be drawn, so there is nothing to mask.
        self._stop_ids = np.array(sorted(i for i in request.stop_ids if i < vocab_size), dtype=np.intp)
        self._seen: SeenTokens | None = None
        if sampling.has_penalties:
            self._seen = SeenTokens(sampling, request.prompt_token_ids, output_token_ids)
        self.matcher = matcher
        if matcher is not None:
            for token_id in output_token_ids:
                matcher.advance(token_id)

    def sample(self, logits: Scores, highest: int | None = None) -> SampledToken:
        """Choose the next token from finite logits [vocab], and advance. `highest` is the token of the highest logit,
        where it is known."""
        scores = self.scores(logits)
        if self._sampling.is_greedy:
            token_id = int(np.argmax(scores)) if highest is None or scores is not logits else highest
        else:
            ids, weights = candidates(scores, self._sampling)
            token_id = int(ids[draw(weights, uniform(self._seed, self._sample_index, self._num_output))])
        self._num_output += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self.matcher is not None:
            self.matcher.advance(token_id)
        wanted = self._sampling.logprobs
        return SampledToken(token_id, None if wanted is None else token_logprobs(logits, token_id, wanted))

    def scores(self, logits: Scores) -> Scores:
        """The logits after bias, penalties and masks; the same array when none applies."""
        masks_stops = self._num_output < self._sampling.min_tokens and len(self._stop_ids) > 0
        if not (masks_stops or len(self._bias_ids) or self._seen or self.matcher):
            return logits
        scores = logits.copy()
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias_values
        if self._seen is not None:
            self._seen.apply(scores)
        if self.matcher is not None:
            allowed = _unpacked(self.matcher.allowed(), len(scores))
            scores[~allowed] = -np.inf
            allowed[self._stop_ids] = False
            masks_stops = masks_stops and bool(allowed.any())  # a complete answer ends, whatever min_tokens says
        if masks_stops:
            scores[self._stop_ids] = -np.inf
        return scores


def _unpacked(bits: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    """A matcher's bits as one bool a logit; a vocabulary may be shorter than the logits, which are padded."""
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    known = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:vocab_size]
    allowed[: len(known)] = known
    return allowed


def candidates(scores: Scores, sampling: SamplingParams) -> tuple[TokenIds, Weights]:
    """The tokens that temperature, top-k, top-p and min-p leave, in id order, and their weights relative to the best
    token's, which is 1. A weight divided by their sum is the token's probability."""
    if sampling.top_k is not None and sampling.top_k < len(scores):
        ids = _best_ids(scores, sampling.top_k)
        scores = scores[ids]
    else:
        ids = np.arange(len(scores))
    # Scores minus the best one are at most 0: no temperature, however small, overflows.
    weights = scores.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore", under="ignore"):
        weights /= sampling.temperature
        np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        kept = _nucleus(scores, weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= sampling.min_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def draw(weights: Weights, uniform_number: float) -> int:
    """The index that inverts the cumulative distribution at a number in [0, 1): the first whose running total exceeds
    that share of the whole. An index of weight 0 is never drawn."""
    block_totals = np.add.reduceat(weights, np.arange(0, len(weights), DRAW_BLOCK))
    total = float(np.cumsum(block_totals)[-1])
    block, before = _first_above(block_totals, uniform_number * total)
    first = block * DRAW_BLOCK
    index, _ = _first_above(weights[first : first + DRAW_BLOCK], uniform_number * total - before)
    return first + index


def _first_above(weights: Weights, target: float) -> tuple[int, float]:
    """The first index whose running total exceeds `target`, and the total before it; the last index of any weight
    where rounding lets none exceed it."""
    running = np.cumsum(weights)
    index = int(min(np.searchsorted(running, target, side="right"), np.searchsorted(running, running[-1], side="left")))
    return index, float(running[index - 1]) if index else 0.0


def token_logprobs(logits: Scores, token_id: int, top_count: int) -> TokenLogprobs:
    """The logprob of a token and of the `top_count` most likely ones under raw logits [vocab]."""
    values = logits.astype(np.float64)
    highest = values.max()
    log_total = highest + np.log(np.exp(values - highest).sum())
    top = _best_ids(logits, min(top_count, len(logits)))
    top = top[np.argsort(-logits[top], kind="stable")]
    return TokenLogprobs(
        token_id,
        float(values[token_id] - log_total),
        tuple((int(other), float(values[other] - log_total)) for other in top),
    )


def _best_ids(scores: Scores, count: int) -> TokenIds:
    """The `count` highest scores' ids, in id order; of equal scores at the border, the lowest ids."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    able = _able_to_rank(scores, count)
    able_scores = scores[able]
    border = np.partition(able_scores, len(able) - count)[len(able) - count]
    kept = np.flatnonzero(able_scores >= border)
    surplus = len(kept) - count
    if surplus > 0:
        kept = np.delete(kept, np.flatnonzero(able_scores[kept] == border)[-surplus:])
    return able[kept]


def _able_to_rank(scores: Scores, count: int) -> TokenIds:
    """A short list that holds the `count` best. Cut the scores into columns: the best of each of `count` columns are
    `count` scores, so no score below the least of them ranks."""
    num_columns = len(scores) // COLUMN_HEIGHT
    if num_columns <= count:
        return np.arange(len(scores))
    best_of_columns = scores[: num_columns * COLUMN_HEIGHT].reshape(COLUMN_HEIGHT, num_columns).max(axis=0)
    return np.flatnonzero(scores >= np.partition(best_of_columns, num_columns - count)[num_columns - count])


def _nucleus(scores: Scores, weights: Weights, top_p: float) -> TokenIds:
    """The fewest best tokens that together hold at least `top_p` of the weight, as ascending indices.

    Without a full sort: tokens below (1 - top_p) / count of the whole weigh less than 1 - top_p together, so the
    nucleus is complete without them; the others fall into buckets by score, and only the border's bucket is sorted."""
    total = float(weights.sum())
    able = np.flatnonzero(weights >= (1.0 - top_p) / len(weights) * total)
    behind = scores.max() - scores[able].astype(np.float64)
    buckets = (behind * (NUM_BUCKETS / max(behind.max(), SMALLEST_SPREAD))).astype(np.intp)
    held = np.cumsum(np.bincount(buckets, weights[able]))
    border = min(int(np.searchsorted(held, top_p * total, side="left")), len(held) - 1)
    undecided = np.flatnonzero(buckets == border)
    ranked = undecided[np.argsort(-scores[able[undecided]], kind="stable")]
    missing = top_p * total - (held[border - 1] if border else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[able[ranked]]), missing, side="left")) + 1
    is_inside = buckets < border
    is_inside[ranked[:count]] = True
    return able[np.flatnonzero(is_inside)]
