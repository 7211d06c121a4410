"""The loop that joins Scheduler and Backend: launch a step, schedule the next while the device works, apply what came
back, tell the caller. One request that fails never stops it. Single-threaded: callers serialise their calls."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from twostroke.backends.interface import Backend, SpeculatingBackend, Ticket
from twostroke.core.errors import BackendError, BackendLostError, BadRequestError
from twostroke.core.events import Event, PrefillProgress, TokenEvent, VectorEvent
from twostroke.core.grammar import Grammars
from twostroke.core.handoff import FirstToken
from twostroke.core.request import Request
from twostroke.core.request_check import check_kind, check_request
from twostroke.core.sequence import FinishReason, Sequence
from twostroke.core.speculation import check_speculation
from twostroke.core.step import SampledToken, Step, StepResult, TokenLogprobs
from twostroke.cost.floor import work_of
from twostroke.cost.step_cost import StepCost
from twostroke.engine.first_token import believed, with_first
from twostroke.engine.interrupts import HeldInterrupts, uninterrupted
from twostroke.engine.step_log import StepLog
from twostroke.engine.streaming import TextStream
from twostroke.engine.tiers import keep_on_disk
from twostroke.scheduling.advance import SequenceAdvance
from twostroke.scheduling.scheduler import Scheduler
from twostroke.text.tokenizer import Tokenizer

TIER_WAIT_S = 0.02
"""The longest that a step without work waits for blocks from disk."""


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
        grammars: Grammars | None = None,
        run_ahead: bool = True,
        check_steps: bool = False,
        step_cost: StepCost | None = None,
        draft_methods: Collection[str] = (),
        gives_vectors: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self.step_cost = step_cost
        """Predicts what the next step should take, and learns from every step. None means that nobody asks."""
        self.draft_methods = draft_methods
        """The names of the methods that may draft."""
        self.gives_vectors = gives_vectors
        """True means that its model pools prompts into vectors, and writes no tokens."""
        self._process = os.getpid()
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._clock = clock
        self._seeds = random.Random(secrets.randbits(128))  # faster than asking the system for each seed
        self._check_steps = check_steps
        self._max_in_flight = self._most_in_flight = 2 if run_ahead else 1
        self._in_flight: deque[tuple[Step, Ticket, float]] = deque()  # the float: when it was launched
        self.step_log = StepLog()
        self._unlearned: list[tuple[Step, StepResult]] = []  # steps that `step_cost` has not seen yet
        self._streams: dict[int, TextStream] = {}
        self._texts: dict[int, list[tuple[str, bool]]] = {}  # read for `apply`, not yet told by `_tell`
        self._live: dict[str, int] = {}  # request id -> samples that have not finished
        self._compiled: dict[str, object] = {}  # request id -> its grammar, so that no step has to compile it again
        self._pending: list[Event] = []  # events that no call of `step` has returned yet
        self.lost: BackendLostError | None = None
        """Why no step will ever come back again. None means that the backend goes on."""
        self.on_step: Callable[[Step, StepResult], None] | None = None
        """Called with every step that came back, so that somebody may count them."""
        self.on_launch: Callable[[Step], None] | None = None
        """Called with every step before it is launched, so that somebody may show what the engine is doing."""

    @property
    def busy(self) -> bool:
        """Whether a call of `step` has something to do."""
        return bool(self._in_flight or self._pending or self.scheduler.has_work)

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and have not been waited for."""
        return len(self._in_flight)

    def run_ahead(self, allowed: bool) -> None:
        """Sets whether the next step may be launched before this one is back, if the engine was built to do so. A
        caller that goes step by step wants nothing to happen in between."""
        self._max_in_flight = self._most_in_flight if allowed else 1

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy of an engine that another process made. Its threads stayed there."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises BackendError in a forked process: a step that is launched there would never come back."""
        if self.is_forked:
            raise BackendError(
                "this engine was made before a fork, and its threads stayed in the other process: create an engine in "
                "this process, or start processes with the method 'spawn'"
            )

    def add(self, request: Request) -> str:
        """Queues a request. Raises BadRequestError if it could never be served."""
        self.check_process()
        if request.request_id in self._live:
            raise BadRequestError(f"request id {request.request_id!r} is already in use")
        check_request(request, self._vocab_size)
        check_kind(request, gives_vectors=self.gives_vectors)
        check_speculation(request.sampling.speculation, self.draft_methods)
        if request.sampling.stop and self._tokenizer is None:
            raise BadRequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        compiled = None if request.sampling.grammar is None else self._check_grammar(request)
        seed = request.sampling.seed
        request = replace(
            request,
            arrival_s=self._clock(),
            seed=self._seeds.getrandbits(64) if seed is None else seed,
            handoff=believed(request, self.scheduler.ledger.handing, self._vocab_size),
        )
        with uninterrupted():
            sequences = self.scheduler.add(request, self._text_begins if self._tokenizer is not None else None)
            for sequence in sequences:
                sequence.timing.step_before = self.step_log.last
            self._live[request.request_id] = len(sequences)
            if compiled is not None:
                self._compiled[request.request_id] = compiled
            if self._tokenizer is not None and not request.wants_vector:
                for sequence in sequences:
                    if sequence.seq_id not in self._streams:
                        self._streams[sequence.seq_id] = self._text_stream(self._tokenizer, request)
            for sequence in sequences:
                if request.first is not None:
                    self._tell_first(sequence, request.first)
                elif sequence.is_finished:
                    self._pending.append(
                        self._finished(TokenEvent(request.request_id, sequence.sample_index, (), ""), sequence)
                    )
        return request.request_id

    @staticmethod
    def _text_stream(tokenizer: Tokenizer, request: Request) -> TextStream:
        sampling = request.sampling
        return TextStream(
            tokenizer,
            sampling.stop,
            include_stop=sampling.include_stop_string,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def _text_begins(self, sequence: Sequence, token_id: int) -> bool:
        """Whether the first token of a request, which another engine drew, ends the answer. Called while the request is
        added."""
        assert self._tokenizer is not None
        self._streams[sequence.seq_id] = self._text_stream(self._tokenizer, sequence.request)
        return self._text_ends(sequence, token_id)

    def _tell_first(self, sequence: Sequence, first: FirstToken) -> None:
        """Tells the first token, which another engine drew, at once, as if it had been drawn here."""
        logprobs = None if first.logprob is None else TokenLogprobs(first.token_id, first.logprob, first.top)
        self._tell(SequenceAdvance(sequence, (SampledToken(first.token_id, logprobs),), finished=sequence.is_finished))

    def _check_grammar(self, request: Request) -> object:
        if self._grammars is None:
            raise BadRequestError(
                "a grammar (structured output, required tools) needs a tokenizer, and this engine was built without"
            )
        if not request.eos_token_ids:
            raise BadRequestError("a grammar needs eos_token_ids: without one no answer could end")
        assert request.sampling.grammar is not None
        return self._grammars.check(request.sampling.grammar)

    def abort(self, request_id: str) -> None:
        """Ends a request at once, whatever it is doing. An unknown or finished id is no error."""
        with uninterrupted():
            for sequence in self.scheduler.abort(request_id, self._clock()):
                event = TokenEvent(request_id, sequence.sample_index, (), "")
                self._pending.append(self._finished(event, sequence))

    def clear_prefixes(self) -> None:
        """Forgets cached prefixes, so that the next prompt is read in full, and the texts that drafts are made from.
        This serves measurements and privacy. What running requests hold stays theirs, and can still be found."""
        with uninterrupted():
            self.scheduler.clear_prefixes()
            if isinstance(self.backend, SpeculatingBackend):
                self.backend.forget_texts()

    def step(self) -> list[Event]:
        """Launches what can be launched, waits for the oldest step in flight, and returns what happened. An interrupt
        during the wait loses nothing: the next call waits for the same step."""
        self.check_process()
        with HeldInterrupts() as interrupts:
            self._launch()
            self._learn()
            if self._in_flight:
                step, ticket, launched_s = self._in_flight[0]
                interrupts.let_through()
                try:
                    outcome: StepResult | Exception = ticket.result()
                except Exception as error:
                    outcome = error
                interrupts.hold()
                self._in_flight.popleft()
                self._settle(step, ticket, outcome, launched_s)
                if not self._in_flight:
                    self._learn()
            else:
                self.scheduler.wait_for_tiers(TIER_WAIT_S)
            if self._check_steps:
                self.scheduler.check()
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Returns the events that were not told yet, without making a step: that a request was aborted, say."""
        events, self._pending = self._pending, []
        return events

    def _launch(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            if self._in_flight and isinstance(self._in_flight[-1][1], _UnlaunchedTicket):
                return  # the backend does not know that step's rows: nothing may build on them
            now_s = self._clock()
            step = self.scheduler.schedule(now_s)
            if step is None:
                return
            if self.on_launch is not None:
                self.on_launch(step)
            ticket: Ticket
            try:
                ticket = self.backend.launch(step)
            except Exception as error:  # it fails in its turn: results are applied in launch order
                ticket = _UnlaunchedTicket(error)
            self._in_flight.append((step, ticket, now_s))

    def _settle(self, step: Step, ticket: Ticket, outcome: StepResult | Exception, launched_s: float) -> None:
        now_s = self._clock()
        if isinstance(outcome, StepResult):
            record = self.step_log.add(step, launched_s, now_s, outcome)
            text_ends = self._text_ends if self._streams else None
            advances = self.scheduler.apply(step, outcome, now_s, record, text_ends)
            if self.step_cost is not None:
                self._unlearned.append((step, outcome))
            if self.on_step is not None:
                self.on_step(step, outcome)
        else:
            if isinstance(outcome, BackendLostError):
                self.lost = outcome
            message = f"the {self.backend.name} backend failed: {str(outcome) or type(outcome).__name__}"
            launched = not isinstance(ticket, _UnlaunchedTicket)
            advances = self.scheduler.fail(step, message, now_s, launched=launched)
        for advance in advances:
            self._tell(advance)

    def _learn(self) -> None:
        """Lets the cost model learn from the steps that came back, once their tokens are told and the next steps are
        launched. A step with prompt logprobs is left out: the head runs for every position of it, so it is not like
        others."""
        for step, result in self._unlearned:
            if self.step_cost is not None and not any(chunk.prompt_logprobs is not None for chunk in step.prefills):
                self.step_cost.observe(work_of(step, result.drafted), result.compute_s - result.drafting_s)
        self._unlearned.clear()

    def close(self) -> None:
        tiers = self.scheduler.ledger.tiers
        if tiers is not None and not self.is_forked:
            with suppress(Exception):  # a backend that failed gives nothing out, and is closed all the same
                keep_on_disk(self.scheduler.ledger, self.backend)
            tiers.close()
        self.backend.close()

    def _tell(self, advance: SequenceAdvance) -> None:
        """Turns what a step did for a sequence into events: one for each token, however many came at once."""
        sequence, pending, prompt_logprobs = advance.sequence, self._pending, advance.prompt_logprobs
        request, index = sequence.request, sequence.sample_index
        name, wants_logprobs = request.request_id, request.sampling.logprobs is not None
        if (computed := advance.prefill_computed) is not None:
            pending.append(PrefillProgress(name, index, computed, sequence.prefill_len))
        texts = self._texts.pop(sequence.seq_id, None) if self._texts else None
        text, stopped, event = "", False, None
        for token_id, logprobs in advance.sampled:
            if event is not None:
                pending.append(event)
                prompt_logprobs = ()
            if self._streams:
                text, stopped = texts.pop(0) if texts else self._text_of(sequence, token_id)
            wanted = (logprobs,) if wants_logprobs and logprobs is not None else ()
            event = TokenEvent(name, index, (token_id,), text, wanted, prompt_logprobs)
        if not (advance.finished or stopped):
            if event is not None:
                pending.append(event)
            elif prompt_logprobs:
                pending.append(TokenEvent(name, index, (), "", (), prompt_logprobs))
            return
        if event is not None and sequence.error is not None and not stopped:
            pending.append(event)  # the error came behind this event
            event = None
        if advance.vector is not None:
            pending.append(VectorEvent(name, advance.vector))
        event = event or TokenEvent(name, index, (), "", (), prompt_logprobs)
        pending.append(self._stopped(event, sequence) if stopped else self._finished(event, sequence))

    def _stopped(self, event: TokenEvent, sequence: Sequence) -> TokenEvent:
        """Ends a sequence whose text has a stop string. No text that was held back may follow it."""
        stop_string = self._streams.pop(sequence.seq_id).stopped_by
        self.scheduler.finish(sequence, FinishReason.STOP, now_s=self._clock())
        # The last token that fits may complete a stop string too: the text was cut there, so that is the reason.
        return self._finished(event, sequence)._replace(finish_reason=FinishReason.STOP, stop_string=stop_string)

    def _text_ends(self, sequence: Sequence, token_id: int) -> bool:
        """Whether a token completes a stop string. Called while the tokens of a step are applied, so that none is kept
        after it."""
        text, stopped = self._text_of(sequence, token_id)
        self._texts.setdefault(sequence.seq_id, []).append((text, stopped))
        return stopped

    def _text_of(self, sequence: Sequence, token_id: int) -> tuple[str, bool]:
        """Returns the text that a new token adds, and whether it completed a stop string."""
        stream = self._streams.get(sequence.seq_id)
        if stream is None or token_id in sequence.stop_ids:
            return "", False  # a stop token says "done": it is not part of the answer
        return stream.push(token_id)

    def _finished(self, event: TokenEvent, sequence: Sequence) -> TokenEvent:
        """Completes the sample's last event: the text that was held back joins it."""
        text, reason, stop_string = event.text, sequence.finish_reason, None
        self.step_log.close(sequence.timing)
        stream = self._streams.pop(sequence.seq_id, None)
        if stream is not None:
            rest, stopped = stream.finish()
            text += rest
            if stopped:
                reason, stop_string = FinishReason.STOP, stream.stopped_by
        name = event.request_id
        self._live[name] -= 1
        if self._live[name] == 0:
            del self._live[name]
            self._compiled.pop(name, None)
        return event._replace(
            text=text,
            finish_reason=reason,
            error=sequence.error,
            timing=sequence.timing,
            stop_string=stop_string,
            handoff=with_first(sequence.handoff, sequence.request, event._replace(finish_reason=reason)),
        )
