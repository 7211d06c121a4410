"""The loop that joins Scheduler and Backend: launch a step, schedule the next while the device works, apply what came
back, tell the caller. One request that fails never stops it. Single-threaded: callers serialise their calls."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from twostroke.backends.interface import Backend, Ticket
from twostroke.core.errors import BadRequestError
from twostroke.core.events import Event, PrefillProgress, TokenEvent
from twostroke.core.request import Request
from twostroke.core.request_check import check_request
from twostroke.core.sequence import FinishReason, Sequence
from twostroke.core.step import Step, StepResult
from twostroke.engine.interrupts import uninterrupted
from twostroke.engine.streaming import TextStream
from twostroke.scheduling.scheduler import Scheduler, SequenceAdvance
from twostroke.text.tokenizer import Tokenizer


class _UnlaunchedTicket:
    """A step that could not even be launched."""

    ready = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        *,
        run_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._clock = clock
        self._max_in_flight = 2 if run_ahead else 1
        self._in_flight: deque[tuple[Step, Ticket]] = deque()
        self._streams: dict[int, TextStream] = {}
        self._live: dict[str, int] = {}  # request id -> samples that have not finished
        self._pending: list[Event] = []  # events that no call of `step` has returned yet

    @property
    def busy(self) -> bool:
        """Whether a call of `step` has something to do."""
        return bool(self._in_flight or self._pending or self.scheduler.has_work)

    def add(self, request: Request) -> str:
        """Queue a request; raises BadRequestError when it could never be served."""
        if request.request_id in self._live:
            raise BadRequestError(f"request id {request.request_id!r} is already in use")
        check_request(request, self._vocab_size)
        if request.sampling.stop and self._tokenizer is None:
            raise BadRequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        seed = request.sampling.seed
        request = replace(request, arrival_s=self._clock(), seed=secrets.randbits(64) if seed is None else seed)
        with uninterrupted():
            sequences = self.scheduler.add(request)
            self._live[request.request_id] = len(sequences)
            if self._tokenizer is not None:
                sampling = request.sampling
                for sequence in sequences:
                    self._streams[sequence.seq_id] = TextStream(
                        self._tokenizer,
                        sampling.stop,
                        include_stop=sampling.include_stop_string,
                        min_tokens=sampling.min_tokens,
                    )
        return request.request_id

    def abort(self, request_id: str) -> None:
        """End a request at once, whatever it is doing; an unknown or finished id is no error."""
        with uninterrupted():
            for sequence in self.scheduler.abort(request_id, self._clock()):
                event = TokenEvent(request_id, sequence.sample_index, (), "")
                self._pending.append(self._finished(event, sequence))

    def step(self) -> list[Event]:
        """Launch what can be launched, wait for the oldest step in flight, and return what happened. An interrupt while
        it waits loses nothing: the next call waits for the same step."""
        with uninterrupted():
            self._launch()
        if self._in_flight:
            step, ticket = self._in_flight[0]
            try:
                outcome: StepResult | Exception = ticket.result()
            except Exception as error:
                outcome = error
            with uninterrupted():
                self._in_flight.popleft()
                self._settle(step, ticket, outcome)
        events, self._pending = self._pending, []
        return events

    def _launch(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            if self._in_flight and isinstance(self._in_flight[-1][1], _UnlaunchedTicket):
                return  # the backend does not know that step's rows: nothing may build on them
            step = self.scheduler.schedule(self._clock())
            if step is None:
                return
            ticket: Ticket
            try:
                ticket = self.backend.launch(step)
            except Exception as error:  # it fails in its turn: results are applied in launch order
                ticket = _UnlaunchedTicket(error)
            self._in_flight.append((step, ticket))

    def _settle(self, step: Step, ticket: Ticket, outcome: StepResult | Exception) -> None:
        now_s = self._clock()
        if isinstance(outcome, StepResult):
            advances = self.scheduler.apply(step, outcome, now_s)
        else:
            message = f"the {self.backend.name} backend failed: {str(outcome) or type(outcome).__name__}"
            launched = not isinstance(ticket, _UnlaunchedTicket)
            advances = self.scheduler.fail(step, message, now_s, launched=launched)
        for advance in advances:
            self._pending.extend(self._events_of(advance))

    def close(self) -> None:
        self.backend.close()

    def _events_of(self, advance: SequenceAdvance) -> list[Event]:
        sequence = advance.sequence
        name, index = sequence.request.request_id, sequence.sample_index
        events: list[Event] = []
        if advance.prefill_computed is not None:
            events.append(PrefillProgress(name, index, advance.prefill_computed, sequence.prefill_len))
        text, stopped = "", False
        for token in advance.sampled:
            text, stopped = self._text_of(sequence, token.token_id)
        if stopped:
            del self._streams[sequence.seq_id]  # nothing held back may follow a stop string
            self.scheduler.finish(sequence, FinishReason.STOP, now_s=self._clock())
        event = TokenEvent(
            name,
            index,
            token_ids=tuple(token.token_id for token in advance.sampled),
            text=text,
            logprobs=tuple(token.logprobs for token in advance.sampled if token.logprobs is not None),
            prompt_logprobs=advance.prompt_logprobs,
        )
        if sequence.is_finished:
            last = self._finished(event, sequence)
            # The last token that fits may complete a stop string too: the text was cut there, so that is the reason.
            events.append(replace(last, finish_reason=FinishReason.STOP) if stopped else last)
        elif event.token_ids or event.prompt_logprobs:
            events.append(event)
        return events

    def _text_of(self, sequence: Sequence, token_id: int) -> tuple[str, bool]:
        """The text a new token adds, and whether it completed a stop string."""
        stream = self._streams.get(sequence.seq_id)
        if stream is None or token_id in sequence.request.stop_ids:
            return "", False  # a stop token says "done": it is not part of the answer
        return stream.push(token_id)

    def _finished(self, event: TokenEvent, sequence: Sequence) -> TokenEvent:
        """The sample's last event: the text that was held back joins it."""
        text, reason = event.text, sequence.finish_reason
        stream = self._streams.pop(sequence.seq_id, None)
        if stream is not None:
            rest, stopped = stream.finish()
            text += rest
            reason = FinishReason.STOP if stopped else reason
        name = event.request_id
        self._live[name] -= 1
        if self._live[name] == 0:
            del self._live[name]
        return replace(event, text=text, finish_reason=reason, error=sequence.error, timing=sequence.timing)
