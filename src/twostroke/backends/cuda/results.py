"""What comes back from the device: sampled tokens copied to pinned memory behind the step's kernels, and an event that
says when they are there. Nobody waits until a ticket's result is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from twostroke.backends.cuda.drafting import NOTHING
from twostroke.backends.cuda.grammar_rows import Stuck
from twostroke.backends.host.host_backend import NOT_FINITE, VECTOR_NOT_FINITE
from twostroke.core.step import Drafted, SampledToken, Step, StepResult, TokenLogprobs

LogprobReader = Callable[[int], TokenLogprobs]
"""Of a sequence's tokens of a step, by their number."""
PromptLogprobReader = Callable[[], tuple[TokenLogprobs, ...] | None]
"""None: some of the prompt's logits are not finite."""
VectorReader = Callable[[], bytes | None]
"""In 32-bit floats, the lowest byte first. None: some are not finite."""
NONE: Mapping[int, Any] = MappingProxyType({})


class Advances(NamedTuple):
    """How the tokens of a step lie, and what was drafted."""

    width: int = 1
    """Of each sequence: what came, then NOTHING."""
    drafted: Mapping[int, Drafted] = NONE
    on_read: Callable[[StepResult], None] | None = None
    """Told once, when the tokens are known."""


ONE_EACH = Advances()


class Arrival:
    """One step's place in host memory, with its events."""

    def __init__(self, capacity: int, *, is_cuda: bool) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int32, pin_memory=is_cuda)
        self.started = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self.arrived = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self.launched_s = 0.0

    def start(self) -> None:
        self.launched_s = time.perf_counter()
        if self.started is not None:
            self.started.record()

    def finish(self, tokens: torch.Tensor) -> None:
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def seconds(self) -> float:
        if self.started is None or self.arrived is None:
            return time.perf_counter() - self.launched_s
        return self.started.elapsed_time(self.arrived) / 1e3


class Results:
    """Arrivals in turn; one is free again when its result was read."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._is_cuda = capacity, device.type == "cuda"
        self._free: list[Arrival] = []

    def start(self) -> Arrival:
        arrival = self._free.pop() if self._free else Arrival(self._capacity, is_cuda=self._is_cuda)
        arrival.start()
        return arrival

    def collect(
        self,
        step: Step,
        arrival: Arrival,
        tokens: torch.Tensor,
        logprobs: Mapping[int, LogprobReader] = NONE,
        prompt_logprobs: Mapping[int, PromptLogprobReader] = NONE,
        stuck: Mapping[int, Stuck] = NONE,
        advances: Advances = ONE_EACH,
        vectors: Mapping[int, VectorReader] = NONE,
    ) -> CudaTicket:
        """`tokens` on the device, `advances.width` for each decode slot and each chunk that samples, in that order. A
        sequence in `stuck` gets those before it: its grammar ends it there."""
        arrival.finish(tokens)
        return CudaTicket(step, arrival, self._free, logprobs, prompt_logprobs, stuck, advances, vectors)


@dataclass(slots=True, eq=False)
class CudaTicket:
    _step: Step
    _arrival: Arrival
    _free: list[Arrival]
    _logprobs: Mapping[int, LogprobReader]
    _prompt_logprobs: Mapping[int, PromptLogprobReader]
    _stuck: Mapping[int, Stuck]
    _advances: Advances
    _vectors: Mapping[int, VectorReader]
    _result: StepResult | None = None

    @property
    def ready(self) -> bool:
        arrived = self._arrival.arrived
        return self._result is not None or arrived is None or arrived.query()

    @property
    def was_read(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        if self._result is None:
            if self._arrival.arrived is not None:
                self._arrival.arrived.synchronize()
            self._result = self._read()
            self._free.append(self._arrival)
            if self._advances.on_read is not None:
                self._advances.on_read(self._result)
        return self._result

    def _read(self) -> StepResult:
        step = self._step
        sampling = sampling_ids(step)
        width = self._advances.width
        tokens = self._arrival.tokens[: len(sampling) * width].tolist()
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        errors: dict[int, str] = {}
        stuck: set[int] = set()
        for place, seq_id in enumerate(sampling):
            came = list(takewhile(lambda token: token >= 0, tokens[place * width : (place + 1) * width]))
            if len(came) < width and tokens[place * width + len(came)] != NOTHING:
                errors[seq_id] = NOT_FINITE
            elif (end := self._stuck.get(seq_id)) is not None and len(came) > end.place:
                del came[end.place :]
                errors[seq_id] = end.reason
                stuck.add(seq_id)
            if came:
                sampled[seq_id] = self._told(seq_id, came)
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for seq_id, read in self._prompt_logprobs.items():
            items = read()
            if items is None:
                errors[seq_id] = NOT_FINITE
            else:
                prompt_logprobs[seq_id] = items
        vectors: dict[int, bytes] = {}
        for seq_id, read_vector in self._vectors.items():
            if (vector := read_vector()) is None:
                errors[seq_id] = VECTOR_NOT_FINITE
            else:
                vectors[seq_id] = vector
        seconds, drafted, ended = self._arrival.seconds(), self._advances.drafted, frozenset(stuck)
        return StepResult(
            step.step_id, sampled, prompt_logprobs, errors, seconds, drafted=drafted, stuck=ended, vectors=vectors
        )

    def _told(self, seq_id: int, tokens: list[int]) -> tuple[SampledToken, ...]:
        read = self._logprobs.get(seq_id)
        if read is None:
            return tuple(map(SampledToken, tokens))
        return tuple(SampledToken(token, read(number)) for number, token in enumerate(tokens))


def sampling_ids(step: Step) -> list[int]:
    """The sequences that get a token of this step: decodes, then the chunks that complete a prefill."""
    ids = [slot.seq_id for slot in step.decodes]
    ids.extend(chunk.seq_id for chunk in step.prefills if chunk.samples)
    return ids
