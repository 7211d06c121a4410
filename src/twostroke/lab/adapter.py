"""Our engine behind the four methods that workloads drive, with a log of what each step computed. The log is kept small
and flat: what the benchmark remembers must not slow what it measures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twostroke.backends.interface import Backend, Ticket
from twostroke.core.errors import BackendError
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.step import Step
from twostroke.cost.floor import StepWork, work_of
from twostroke.engine.engine import Engine
from twostroke.lab.workload import TEMPERATURE


class StepRecorder:
    """A backend that notes each step before it passes it on."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.max_drafts = backend.name, backend.max_drafts
        self.backend = backend
        self.in_flight: deque[StepWork] = deque()

    def launch(self, step: Step) -> Ticket:
        self.in_flight.append(work_of(step))
        return self.backend.launch(step)

    def close(self) -> None:
        self.backend.close()


class EngineAdapter:
    """`add`, `step`, `busy`, `clear_prefix`. The engine is watched from here on, and stays its owner's to close."""

    def __init__(self, engine: Engine, temperature: float = TEMPERATURE) -> None:
        self._engine = engine
        self.written: dict[str, list[int]] | None = None
        """The tokens of each request since this was last set to an empty dictionary; None: they are not kept."""
        self.service_level = ""
        """The class of what is added from now on."""
        self._temperature = temperature
        self._num_requests = 0
        self._recorder = engine.backend if isinstance(engine.backend, StepRecorder) else StepRecorder(engine.backend)
        engine.backend = self._recorder
        if not engine.busy:
            self._recorder.in_flight.clear()  # of steps that were made without an adapter
        self._log: list[StepWork] = []
        self._live: set[str] = set()

    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        self._num_requests += 1
        sampling = SamplingParams(
            temperature=self._temperature, max_tokens=out_len, ignore_eos=True, speculation=NO_DRAFTS
        )
        name = f"bench-{self._num_requests}"
        request_id = self._engine.add(Request(name, tuple(token_ids), sampling, service_level=self.service_level))
        self._live.add(request_id)
        return request_id

    def step(self) -> list[tuple[str, int, bool]]:
        events = self._engine.step()
        # A call waits for the oldest step in flight, where there is one; results come in launch order.
        in_flight = self._recorder.in_flight
        self._log.append(in_flight.popleft() if in_flight else StepWork())
        outputs = []
        for event in events:
            if not isinstance(event, TokenEvent):
                continue
            if event.error is not None:
                raise BackendError(event.error)
            if self.written is not None:
                self.written.setdefault(event.request_id, []).extend(event.token_ids)
            is_finished = event.finish_reason is not None
            if is_finished:
                self._live.discard(event.request_id)
            outputs.append((event.request_id, len(event.token_ids), is_finished))
        return outputs

    def busy(self) -> bool:
        return self._engine.busy

    def clear_prefix(self) -> None:
        self._engine.clear_prefixes()

    def take_log(self) -> list[StepWork]:
        """What each call of `step` since the last time saw done, one entry a call."""
        log, self._log = self._log, []
        return log

    def abandon(self) -> None:
        """End what a workload that failed has left behind."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()
        while self._engine.busy:
            self._engine.step()
        self._recorder.in_flight.clear()
        self._log.clear()
