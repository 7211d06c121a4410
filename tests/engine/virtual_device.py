"""A backend for the real Engine on a clock that moves when somebody waits: steps take what they are said to cost."""

from __future__ import annotations

from twostroke.core.step import SampledToken, Step, StepResult
from twostroke.cost.floor import work_of
from twostroke.cost.step_cost import StepCost


class VirtualDevice:
    name = "virtual"
    max_drafts = 0

    def __init__(self, cost: StepCost, newcomer_s: float = 0.0, newcomer_s_per_token: float = 0.0) -> None:
        """Each newcomer costs so much before its first step begins."""
        self.now_s = self._free_s = 0.0
        self._cost, self._newcomer_s, self._newcomer_s_per_token = cost, newcomer_s, newcomer_s_per_token

    def clock(self) -> float:
        return self.now_s

    def launch(self, step: Step) -> VirtualTicket:
        newcomers_s = 0.0
        for join in step.joins:
            newcomers_s += self._newcomer_s + self._newcomer_s_per_token * len(join.request.prompt_token_ids)
        seconds = self._cost.seconds(work_of(step))
        self._free_s = max(self.now_s + newcomers_s, self._free_s) + seconds
        return VirtualTicket(self, step, seconds, self._free_s)

    def close(self) -> None:
        pass


class VirtualTicket:
    ready = False

    def __init__(self, device: VirtualDevice, step: Step, seconds: float, ends_s: float) -> None:
        self._device, self._step, self._seconds, self._ends_s = device, step, seconds, ends_s

    def result(self) -> StepResult:
        self._device.now_s = max(self._device.now_s, self._ends_s)
        names = [slot.seq_id for slot in self._step.decodes]
        names += [chunk.seq_id for chunk in self._step.prefills if chunk.samples]
        return StepResult(self._step.step_id, dict.fromkeys(names, (SampledToken(0),)), compute_s=self._seconds)
