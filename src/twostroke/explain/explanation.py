"""An explanation: a sample's timeline and its verdict, made when it is asked for from what the engine remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.core.timing import SequenceTiming
from twostroke.explain.facts import EngineFacts, StepSeconds, Yardstick
from twostroke.explain.timeline import Delivery, Span, timeline
from twostroke.explain.verdict import Verdict, verdict


@dataclass(frozen=True, slots=True)
class Explanation:
    verdict: Verdict
    spans: tuple[Span, ...]
    is_fitted: bool
    """Whether predictions come from costs fitted to this engine's own steps; else from the ratios of floors."""
    doubt: str | None = None
    """Why they do not, where that is known."""

    def __str__(self) -> str:
        return self.verdict.sentence


class Explainer:
    def __init__(
        self,
        facts: Callable[[], EngineFacts],
        fitted: Callable[[], StepSeconds | None],
        doubt: Callable[[], str | None] = lambda: None,
    ) -> None:
        """All are asked when an explanation is: finding out what a machine allows may take a moment, and costs are
        fitted better the longer an engine has run. `doubt`: why `fitted` gives nothing."""
        self._facts = facts
        self._fitted = fitted
        self._doubt = doubt

    def explain(self, timing: SequenceTiming, delivery: Delivery | None = None) -> Explanation:
        facts = self._facts()
        yardstick = Yardstick(facts, self._fitted())
        return Explanation(
            verdict(timing, facts, yardstick), timeline(timing, delivery), yardstick.is_fitted, self._doubt()
        )
