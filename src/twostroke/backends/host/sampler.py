"""Chooses a token from logits, as the reference that every backend agrees with. Knows one row; nothing of the batch.

Order: logit bias; repetition, then presence and frequency penalties; tokens outside the grammar masked, and stop ids
below min_tokens; then the highest score (greedy), or temperature, top-k, top-p, min-p and one draw. Equal scores rank
by token id, the lowest first. Logprobs are of the model's own distribution: log-softmax of the raw logits, before bias,
penalties and temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
"""Top-k first looks at the best score of each group of this many."""
NUM_BUCKETS = 1024
SMALLEST_SPREAD = 1e-30
DRAW_BLOCK = 512
"""Weights are summed in blocks, then inside one block."""
PART = 16 * DRAW_BLOCK
"""How many weights are computed at a time: 64 KiB of them stay in a core's cache."""


class RowSampler:
    """One row's sampling: its parameters, and the state that advances by one token with each `sample`. A row that is
    rebuilt from the tokens it has written continues as if it had never stopped."""

    def __init__(
        self,
        request: Request,
        sample_index: int,
        output_token_ids: tuple[int, ...],
        vocab_size: int,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """`matcher` is at the beginning of the answer, and belongs to this row from now on."""
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
        """Chooses the next token from finite logits [vocab], and advances. `highest` is the token of the highest logit,
        if it is known."""
        scores = self.scores(logits)
        if self._sampling.is_greedy:
            token_id = int(np.argmax(scores)) if highest is None or scores is not logits else highest
        else:
            token_id = choose(scores, self._sampling, uniform(self._seed, self._sample_index, self._num_output))
        self._num_output += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self.matcher is not None:
            self.matcher.advance(token_id)
        wanted = self._sampling.logprobs
        return SampledToken(token_id, None if wanted is None else token_logprobs(logits, token_id, wanted))

    def scores(self, logits: Scores) -> Scores:
        """Returns the logits after bias, penalties and masks. It is the same array if none applies."""
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
    """Returns a matcher's bits as one bool for each logit. A vocabulary may be shorter than the logits, which are
    padded."""
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    known = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:vocab_size]
    allowed[: len(known)] = known
    return allowed


def choose(scores: Scores, sampling: SamplingParams, uniform_number: float) -> int:
    """Returns the token that temperature, top-k, top-p, min-p and a number in [0, 1) draw from these scores."""
    is_filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0 or len(scores) > (sampling.top_k or len(scores))
    if not is_filtered:
        return _draw_from_all(scores, sampling.temperature, uniform_number)
    ids, weights = candidates(scores, sampling)
    return int(ids[draw(weights, uniform_number)])


def candidates(scores: Scores, sampling: SamplingParams) -> tuple[TokenIds, Weights]:
    """Returns the tokens that temperature, top-k, top-p and min-p leave, in id order, and their weights relative to the
    best token's, which is 1. A weight divided by their sum is the token's probability."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    known = _best_ids(scores, top_k) if top_k is not None and top_k < len(scores) else None
    if known is not None:
        scores = scores[known]
    parts, least, total = list(_weights(scores, sampling.temperature)), min_p, 0.0
    if top_p < 1.0:
        # Tokens below this weigh less than 1 - top_p of the whole together: the nucleus is complete without them.
        total = float(np.sum([weights.sum() for _, weights in parts]))
        least = (1.0 - top_p) / len(scores) * total
    ids, weights = _weighing(parts, least)
    if top_p < 1.0:
        kept = _nucleus(scores[ids], weights, top_p * total)
        ids, weights = ids[kept], weights[kept]
        if min_p > 0.0:
            kept = np.flatnonzero(weights >= min_p)
            ids, weights = ids[kept], weights[kept]
    return ids if known is None else known[ids], weights


def _weights(scores: Scores, temperature: float) -> Iterator[tuple[int, Weights]]:
    """Yields the weights of all scores relative to the best one's, in parts: where each begins, and its weights. Arrays
    of a whole vocabulary would be new memory each time, which costs more to map than to fill."""
    best = float(scores.max())
    for first in range(0, len(scores), PART):
        yield first, _weights_beside(best, scores[first : first + PART], temperature)


def _weights_beside(best: float, scores: Scores, temperature: float) -> Weights:
    # Scores minus the best one are at most 0: no temperature, however small, overflows.
    weights = scores.astype(np.float64)
    weights -= best
    with np.errstate(over="ignore", under="ignore"):
        if temperature != 1.0:
            weights /= temperature
        np.exp(weights, out=weights)
    return weights


def _weighing(parts: Sequence[tuple[int, Weights]], least: float) -> tuple[TokenIds, Weights]:
    """Returns the tokens of at least this weight, and their weights."""
    ids, found = [], []
    for first, weights in parts:
        kept = np.flatnonzero(weights >= least)
        ids.append(kept + first)
        found.append(weights[kept])
    return np.concatenate(ids), np.concatenate(found)


def _draw_from_all(scores: Scores, temperature: float, uniform_number: float) -> int:
    """Draws from the weights of every token, as `draw` does. The weights of the block that is drawn are computed
    again."""
    parts = [np.add.reduceat(part, np.arange(0, len(part), DRAW_BLOCK)) for _, part in _weights(scores, temperature)]
    block, target = _block_of(np.concatenate(parts), uniform_number)
    first = block * DRAW_BLOCK
    inside = _weights_beside(float(scores.max()), scores[first : first + DRAW_BLOCK], temperature)
    return first + _first_above(inside, target)[0]


def draw(weights: Weights, uniform_number: float) -> int:
    """Returns the index that inverts the cumulative distribution at a number in [0, 1): the first whose running total
    exceeds that share of the whole. An index of weight 0 is never drawn."""
    block, target = _block_of(np.add.reduceat(weights, np.arange(0, len(weights), DRAW_BLOCK)), uniform_number)
    first = block * DRAW_BLOCK
    return first + _first_above(weights[first : first + DRAW_BLOCK], target)[0]


def _block_of(block_totals: Weights, uniform_number: float) -> tuple[int, float]:
    """Returns the block that the number falls into, and how far into its weight."""
    total = float(np.cumsum(block_totals)[-1])
    block, before = _first_above(block_totals, uniform_number * total)
    return block, uniform_number * total - before


def _first_above(weights: Weights, target: float) -> tuple[int, float]:
    """Returns the first index whose running total exceeds `target`, and the total before it. If rounding lets none
    exceed it, it is the last index of any weight."""
    running = np.cumsum(weights)
    index = int(min(np.searchsorted(running, target, side="right"), np.searchsorted(running, running[-1], side="left")))
    return index, float(running[index - 1]) if index else 0.0


def token_logprobs(logits: Scores, token_id: int, top_count: int) -> TokenLogprobs:
    """Returns the logprob of a token and of the `top_count` most likely ones under raw logits [vocab]."""
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
    """Returns the ids of the `count` highest scores, in id order. Of equal scores at the border it takes the lowest
    ids."""
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
    """Returns a short list that holds the `count` best. Scores are cut into columns. The best of each of `count`
    columns are `count` scores, so no score below the least of them ranks."""
    num_columns = len(scores) // COLUMN_HEIGHT
    if num_columns <= count:
        return np.arange(len(scores))
    best_of_columns = scores[: num_columns * COLUMN_HEIGHT].reshape(COLUMN_HEIGHT, num_columns).max(axis=0)
    return np.flatnonzero(scores >= np.partition(best_of_columns, num_columns - count)[num_columns - count])


def _nucleus(scores: Scores, weights: Weights, wanted: float) -> TokenIds:
    """Returns the fewest best tokens that together weigh at least `wanted`, as ascending indices. It does not sort all:
    tokens fall into buckets by score, and only the border's bucket is sorted."""
    behind = scores.max() - scores.astype(np.float64)
    buckets = (behind * (NUM_BUCKETS / max(behind.max(), SMALLEST_SPREAD))).astype(np.intp)
    held = np.cumsum(np.bincount(buckets, weights))
    border = min(int(np.searchsorted(held, wanted, side="left")), len(held) - 1)
    undecided = np.flatnonzero(buckets == border)
    ranked = undecided[np.argsort(-scores[undecided], kind="stable")]
    missing = wanted - (held[border - 1] if border else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[ranked]), missing, side="left")) + 1
    is_inside = buckets < border
    is_inside[ranked[:count]] = True
    return np.flatnonzero(is_inside)
