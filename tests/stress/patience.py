"""How many steps a request may take before it counts as starving: a bound that holds for every policy, from what may go
before it. It is no measure of how well a policy does; it ends, however much else comes, and that is the point."""

from __future__ import annotations

from collections.abc import Iterable

from tests.stress.scenario import PRIORITIES, Setup
from tests.stress.trouble import seconds_of
from twostroke.core.request import Request
from twostroke.scheduling.policies.slack import UNPROMISED_S
from twostroke.scheduling.virtual_time import CREDIT_S

BASE_STEPS, STEPS_PER_TOKEN = 30, 2.0
"""By the tokens of all that may go before it. Preemption computes some of them again, a long line is let in one by one,
and a step holds more than a token."""


class Patience:
    def __init__(self, setup: Setup) -> None:
        self._aging_s = setup.config["priority_aging_s"]
        self._promised_s = {level.name: level.ttft_s for level in setup.levels}
        self._is_fifo = setup.policy == "fifo"
        self._least_step_s = seconds_of(1) * setup.slowness
        self._least_offset_s = min(PRIORITIES) * self._aging_s + min(map(self._allowed_s, ("", *self._promised_s)))
        self._flows: set[tuple[str, str]] = set()
        weights = [1.0, *(level.weight for level in setup.levels)]
        self._unevenness = max(weights) / min(weights) if setup.policy == "fair" else 1.0

    def of(self, request: Request, num_tokens: int, waiting: Iterable[tuple[Request, int]]) -> tuple[float, float]:
        """Of a newcomer whose samples grow to so many tokens, behind those that are there with theirs: the tokens that
        may go before it, and the steps in which whatever comes may pass it."""
        waiting = list(waiting)
        self._flows.add((request.tenant, request.call))
        ahead = sum(tokens for _, tokens in waiting) + request.sampling.n * num_tokens
        handicap_s = self._offset_s(request) - self._least_offset_s
        if self._is_fifo:
            return ahead, self.steps_within(handicap_s)
        # A call's turn is as old as the last one of it that was let in.
        in_call = request.sampling.n
        if request.call:
            in_call += sum((one.tenant, one.call) == (request.tenant, request.call) for one, _ in waiting)
        return ahead, self.steps_within(in_call * handicap_s + CREDIT_S)

    def steps(self, num_tokens: float, passing: float) -> float:
        """Calls and tenants take turns, so each of those before it may let one of each other flow go in between."""
        turns = 1.0 if self._is_fifo else len(self._flows) * self._unevenness
        return BASE_STEPS + STEPS_PER_TOKEN * turns * num_tokens + passing

    def may_pass(self, newcomer: Request, other: Request) -> bool:
        """Whether it is due before one that has waited longer."""
        return newcomer.arrival_s + self._offset_s(newcomer) < other.arrival_s + self._offset_s(other)

    def steps_within(self, seconds: float) -> float:
        return seconds / self._least_step_s

    def _offset_s(self, request: Request) -> float:
        """When it is due, from its arrival on."""
        return request.priority * self._aging_s + self._allowed_s(request.service_level)

    def _allowed_s(self, level: str) -> float:
        promised_s = self._promised_s.get(level)
        return 0.0 if self._is_fifo else UNPROMISED_S if promised_s is None else promised_s
