"""What an explanation has to know of the engine: its limits, the costs of its model, and a yardstick for work that was
not done but might have been."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twostroke.cost.floor import StepWork, step_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class EngineFacts:
    shape: ModelShape
    ceilings: Ceilings
    max_running: int
    max_tokens_per_step: int
    block_size: int
    num_blocks: tuple[int, ...]
    """One a KV group."""
    kv_bytes: int
    itl_target_s: float | None = None
    """What bounds the prefill beside running streams; None: the step's token budget alone."""
    draft_methods: tuple[str, ...] = ()
    """Who drafts, by name."""
    drafts_nothing: str | None = None
    """Where nobody does, why."""
    int8_kv_share: float | None = None
    """The size of a token's KV in int8, as a share of what it takes now; None: not smaller, or not to be had."""


class StepSeconds(Protocol):
    """A fitted cost of steps."""

    def seconds(self, work: StepWork) -> float:
        """What a step with exactly this work should take."""


class Yardstick:
    """Compares pieces of work: by the fitted cost where there is one, else by their floors. Only ratios are used, and
    applied to what was measured: so a machine that is slow today is slow in the prediction too."""

    def __init__(self, facts: EngineFacts, fitted: StepSeconds | None) -> None:
        self._facts = facts
        self._fitted = fitted

    @property
    def is_fitted(self) -> bool:
        return self._fitted is not None

    def seconds(self, work: StepWork) -> float:
        if self._fitted is not None:
            return self._fitted.seconds(work)
        return step_floor_s(self._facts.shape, work, self._facts.ceilings)

    def ratio(self, work: StepWork, to: StepWork) -> float:
        """What `work` costs as a share of `to`; 1 where that is nothing."""
        whole = self.seconds(to)
        return self.seconds(work) / whole if whole > 0.0 else 1.0
