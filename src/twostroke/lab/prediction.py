"""What the cost model says beforehand of the work that an experiment measures: whole requests as the steps that the
scheduler makes of them. Where nothing was calibrated, the floors are all that is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.cost.floor import StepWork, step_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape


@dataclass(frozen=True)
class Prediction:
    shape: ModelShape
    ceilings: Ceilings
    chunk_tokens: int
    """The most prompt tokens that one step takes."""
    calibrated_s: Callable[[StepWork], float] | None = None
    """Seconds of a step by the calibrated cost model; None: there is no calibration."""
    newcomer_s: Callable[[int], float] = lambda prompt_tokens: 0.0
    """What a prompt costs beside its steps, by its tokens, where it comes to an idle engine."""
    origin: str = "nothing was calibrated"
    """Of the calibration."""

    @property
    def name(self) -> str:
        return "calibrated cost model" if self.is_calibrated else "floor"

    @property
    def is_calibrated(self) -> bool:
        return self.calibrated_s is not None

    def floor_s(self, work: StepWork) -> float:
        return step_floor_s(self.shape, work, self.ceilings)

    def step_s(self, work: StepWork) -> float:
        """The best guess there is."""
        return self.floor_s(work) if self.calibrated_s is None else self.calibrated_s(work)

    def steps_s(self, works: Iterable[StepWork]) -> float:
        """Of whole requests: a prompt that is read alone came to an idle engine, which took it in first."""
        seconds = 0.0
        for work in works:
            seconds += self.step_s(work)
            if work.num_sampling_chunks and not work.contexts:
                seconds += self.newcomer_s(sum(map(sum, work.chunks)))
        return seconds

    def floors_s(self, works: Iterable[StepWork]) -> float:
        return sum(map(self.floor_s, works))


def prefill_steps(prompt_len: int, chunk_tokens: int, cached: int = 0, contexts: Sequence[int] = ()) -> list[StepWork]:
    """The steps that read a prompt, `cached` tokens of which are there, beside streams of these contexts."""
    works: list[StepWork] = []
    start = cached
    while start < prompt_len:
        num_tokens = min(chunk_tokens, prompt_len - start)
        is_last = start + num_tokens == prompt_len
        beside = [context + len(works) for context in contexts]
        works.append(StepWork(((start, num_tokens),), int(is_last), beside))
        start += num_tokens
    return works


def decode_steps(first_context: int, num_tokens: int, batch: int = 1) -> list[StepWork]:
    """The steps in which each stream of a batch writes `num_tokens` tokens, `first_context` known at the first."""
    return [StepWork(contexts=[first_context + index] * batch) for index in range(num_tokens)]


def mean_error(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """The mean absolute relative error of predictions."""
    return sum(abs(b - a) / a for a, b in zip(measured, predicted, strict=True)) / len(measured)
