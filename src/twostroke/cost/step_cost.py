"""Predicts how long a step takes, from a handful of physical terms. Each is the floor of one part of the work, times
what that part costs here for each second of floor. The factors are fitted as steps are measured, and so is the error of
the predictions. Knows shapes and rates; knows nothing of backends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import mul

from twostroke.cost.floor import StepWork, contexts_bytes_read
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.online_fit import OnlineFit
from twostroke.cost.row_factors import RowFactors

OVERHEAD_UNIT_S = 1e-3
"""Overheads are fitted in milliseconds, so that all coefficients are of similar size."""
ERROR_WINDOW = 200
"""The error is the mean over about this many of the latest predictions."""
SURPRISE = 0.3
"""If a prediction is off by more than this share, the step teaches less in proportion: something else held it up."""
TRUSTED_AFTER = 10
"""How many observations are made before anything counts as a surprise."""
KNOWN_AFTER, KNOWN_STRIDE = 64, 8
"""Once a kind of step was seen KNOWN_AFTER times, only every KNOWN_STRIDEth one teaches. Most steps of an engine are
like the one before, and learning takes some of the time of a small model's step."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds of overhead and, for each other part of a step, how many times its floor that part takes."""

    step_s: float = 2e-4
    """Overhead of any step, whatever is in it."""
    prefill_s: float = 2e-4
    """Further overhead of a step that holds a prefill chunk."""
    weights_alone: float = 1.1
    """Reading the weights once, at the measured bandwidth, in a step of one token: backends have kernels for it."""
    weights: float = 1.2
    """Reading the weights once in a step of several tokens."""
    matmul_in_shadow: float = 0.3
    """Arithmetic of the layers' matrix products, up to the time of reading the weights. It is free where the hardware
    overlaps the two."""
    matmul: float = 1.3
    """The rest of that arithmetic, at the measured peak."""
    attention: float = 2.0
    """Scores and weighted values of prefill chunks, and of drafts, which meet a context that their slot has read. If
    reading the KV before a short chunk takes longer, it is that reading."""
    kv: float = 1.5
    """Reading the contexts of decode slots, at the measured bandwidth."""
    sampled: float = 1.5
    """The head's arithmetic, and all else that a token takes because it may be sampled."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise ValueError(f"{field.name} must be a number, not negative and finite, not {value!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Coefficients:
        """Returns the coefficients of parsed JSON. Raises ValueError for anything but all of the fields, as valid
        numbers."""
        names = [field.name for field in fields(cls)]
        if set(values) != set(names):
            raise ValueError(f"coefficients are {', '.join(names)}, not {', '.join(sorted(map(str, values)))}")
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks each

    @property
    def factors(self) -> tuple[float, ...]:
        """The numbers that the terms of `StepTerms` are multiplied by."""
        return tuple(getattr(self, name) / unit for name, unit in _UNITS.items())


PARTS = tuple(field.name for field in fields(Coefficients))
_UNITS = {name: OVERHEAD_UNIT_S if name.endswith("_s") else 1.0 for name in PARTS}


class StepTerms:
    """Divides a step into terms: the unit of overheads, then the floor of each part, in the order of `Coefficients`."""

    def __init__(self, shape: ModelShape, ceilings: Ceilings) -> None:
        self._shape = shape
        self._read_bytes_per_s = ceilings.read_bytes_per_s
        self._multiply_adds_per_s = ceilings.multiply_adds_per_s
        self._matmul_s_per_token = shape.layer_matmul_parameters / ceilings.multiply_adds_per_s
        self._head_s_per_token = shape.head_matmul_parameters / ceilings.multiply_adds_per_s

    def seconds(self, work: StepWork, factors: Sequence[float]) -> float:
        if not work.chunks and not work.queries and work.contexts:
            return self._streams_seconds(work.contexts, factors)
        return math.fsum(map(mul, self.of(work), factors))

    def _streams_seconds(self, contexts: Sequence[int], factors: Sequence[float]) -> float:
        """Returns the same for a step in which streams only write, one token each. Most steps are such, and a scheduler
        asks for several of them at each. Terms that are 0 are left out, which does not change an exact sum."""
        num_tokens = len(contexts)
        weights_s = self._shape.expected_bytes_read(num_tokens) / self._read_bytes_per_s
        matmul_s = self._matmul_s_per_token * num_tokens
        step, _, alone, weights, in_shadow, matmul, _, kv, sampled = factors
        return math.fsum(
            (
                OVERHEAD_UNIT_S * step,
                weights_s * (alone if num_tokens == 1 else weights),
                (matmul_s if matmul_s < weights_s else weights_s) * in_shadow,
                (matmul_s - weights_s) * matmul if matmul_s > weights_s else 0.0,
                contexts_bytes_read(self._shape, contexts) / self._read_bytes_per_s * kv,
                self._head_s_per_token * num_tokens * sampled,
            )
        )

    def of(self, work: StepWork) -> tuple[float, ...]:
        num_queries = num_tokens = work.num_queries
        attention_s = 0.0
        for start, length in work.chunks:
            num_tokens += length
            attention_s += self._attention_s(start, length)
        for context, queries in zip(work.contexts, work.queries, strict=False):
            if queries > 1:
                attention_s += self._multiply_adds_s(context - queries + 1, queries - 1, is_chunk=False)
        if not num_tokens:
            return (0.0,) * len(PARTS)
        weights_s = self._shape.expected_bytes_read(num_tokens) / self._read_bytes_per_s
        matmul_s = self._matmul_s_per_token * num_tokens
        return (
            OVERHEAD_UNIT_S,
            OVERHEAD_UNIT_S if work.chunks else 0.0,
            weights_s if num_tokens == 1 else 0.0,
            weights_s if num_tokens > 1 else 0.0,
            matmul_s if matmul_s < weights_s else weights_s,
            matmul_s - weights_s if matmul_s > weights_s else 0.0,
            attention_s,
            contexts_bytes_read(self._shape, work.contexts) / self._read_bytes_per_s,
            self._head_s_per_token * (num_queries + work.num_sampling_chunks),
        )

    def _attention_s(self, start: int, length: int) -> float:
        """Returns the floor of a chunk's attention."""
        seconds = self._multiply_adds_s(start, length, is_chunk=True)
        return max(seconds, self._shape.kv_bytes_read(start) / self._read_bytes_per_s) if start else seconds

    def _multiply_adds_s(self, start: int, length: int, *, is_chunk: bool) -> float:
        found = self._shape.expected_attention_multiply_adds(start, length, is_chunk=is_chunk)
        return found / self._multiply_adds_per_s


class StepCost:
    def __init__(
        self,
        shape: ModelShape,
        ceilings: Ceilings,
        coefficients: Coefficients | None = None,
        calibrated_error: float | None = None,
    ) -> None:
        """`coefficients` come from a calibration, whose own error is `calibrated_error`. None means to begin with what
        engines commonly reach."""
        self.shape = shape
        self.ceilings = ceilings
        self.calibrated_error = calibrated_error
        self.num_observed = 0
        self.error: float | None = None
        """Running mean of |predicted - measured| / measured. Each step was predicted before it was measured."""
        self._seen: dict[tuple[int, int], int] = {}
        self._fit = OnlineFit(list((coefficients or Coefficients()).factors))
        self._rows = RowFactors()
        self._terms = StepTerms(shape, ceilings)

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(*map(mul, self._fit.coefficients, _UNITS.values()))

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds that a step with exactly this work should take."""
        return self._factor(work) * self._terms.seconds(work, self._fit.coefficients)

    def parts(self, work: StepWork) -> dict[str, float]:
        """Returns these seconds by part, named as in `Coefficients`."""
        factor = self._factor(work)
        seconds = [factor * part for part in map(mul, self._terms.of(work), self._fit.coefficients)]
        return dict(zip(PARTS, seconds, strict=True))

    def _factor(self, work: StepWork) -> float:
        return 1.0 if work.chunks else self._rows.of(work.num_queries)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Counts how far off the prediction of a step was, and learns from what it took."""
        if not 0.0 < seconds < math.inf:
            return
        terms = self._terms.of(work)
        if not terms[0]:
            return  # an empty step
        predicted = sum(map(mul, terms, self._fit.coefficients))
        self.num_observed += 1
        share = abs(self._factor(work) * predicted - seconds) / seconds
        before = self.error or 0.0
        self.error = before + (share - before) / min(self.num_observed, ERROR_WINDOW)
        if not work.chunks and predicted > 0.0:
            self._rows.learn(work.num_queries, seconds / predicted)
        miss = abs(predicted - seconds)
        kind = (sum(tokens for _, tokens in work.chunks).bit_length(), work.num_queries.bit_length())
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen > KNOWN_AFTER and seen % KNOWN_STRIDE:
            return
        # Errors count relative to the step. The larger of the two bounds the weight of a prediction that is far off.
        scale = max(seconds, predicted) if self.num_observed > TRUSTED_AFTER else seconds
        surprise = miss / (scale * SURPRISE)
        if surprise > 1.0 and self.num_observed > TRUSTED_AFTER:
            scale *= math.sqrt(surprise)
        self._fit.observe(kind, [term / scale for term in terms], seconds / scale)
