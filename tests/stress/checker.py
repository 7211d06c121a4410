"""What must hold whatever happens: no block lost, no token lost, repeated or swapped, no request harmed by another's
trouble, none that waits forever, and nothing left over at the end. Each rule raises `BrokenRuleError` and says what
was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.stress.device import PagedDevice
from tests.stress.hash_model import Answer
from tests.stress.patience import Patience
from tests.stress.scenario import Setup
from twostroke.core.events import Event, PrefillProgress, TokenEvent
from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason
from twostroke.engine.engine import Engine
from twostroke.kv.block_pool import ConservationError
from twostroke.kv.tiers.tiers import KVTiers

MOST_IDLE = 3
"""Steps in a row in which an engine with work may launch nothing and tell nothing."""


class BrokenRuleError(AssertionError):
    """A rule does not hold."""


@dataclass
class Stream:
    """What the client of one sample has seen."""

    answer: Answer
    born_step: int
    ahead: float
    """Tokens that may go before its own, and those."""
    passing: float
    """Steps in which whatever comes may pass it."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_places: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    was_aborted: bool = False

    @property
    def name(self) -> tuple[str, int]:
        return self.answer.request.request_id, self.answer.sample_index


class Checker:
    def __init__(self, engine: Engine, device: PagedDevice, setup: Setup) -> None:
        self._engine, self._device = engine, device
        self._patience = Patience(setup)
        self.streams: dict[tuple[str, int], Stream] = {}
        self._unfinished: dict[tuple[str, int], Stream] = {}
        self.num_steps = self._num_launched = self._num_idle = 0
        self.num_tokens = 0
        self.longest_share = 0.0
        """Of its patience, what any request has used up."""

    # What the players tell

    def arrived(self, request: Request, max_total_tokens: int) -> None:
        """`request` as the engine has it: with its arrival."""
        layout = self._device.layout
        answers = [Answer(request, index, max_total_tokens, layout) for index in range(request.sampling.n)]
        waiting = [(stream.answer.request, stream.answer.max_total_tokens) for stream in self._unfinished.values()]
        ahead, passing = self._patience.of(request, max_total_tokens, waiting)
        for stream in self._unfinished.values():
            if self._patience.may_pass(request, stream.answer.request):
                stream.ahead += len(answers) * max_total_tokens
        for answer in answers:
            stream = Stream(answer, self.num_steps, ahead, passing)
            self.streams[stream.name] = self._unfinished[stream.name] = stream

    def jumped(self, seconds: float) -> None:
        """The clock was put back: whatever was due is due later."""
        for stream in self._unfinished.values():
            stream.passing += self._patience.steps_within(max(0.0, -seconds))

    def aborted(self, request_id: str) -> None:
        for stream in self._unfinished.values():
            if stream.answer.request.request_id == request_id:
                stream.was_aborted = True

    @property
    def unfinished(self) -> list[str]:
        return list(dict.fromkeys(request_id for request_id, _ in self._unfinished))

    # After every step

    def stepped(self, events: list[Event]) -> None:
        self.num_steps += 1
        moved = self._device.num_steps > self._num_launched or bool(events)
        self._num_launched = self._device.num_steps
        tiers = self._engine.scheduler.ledger.tiers
        self._num_idle = 0 if moved or (tiers is not None and tiers.num_fetching) else self._num_idle + 1
        if self._num_idle > MOST_IDLE and self._unfinished:
            raise BrokenRuleError(f"the engine stands still, and {list(self._unfinished)} wait")
        for event in events:
            if isinstance(event, TokenEvent):
                self._see(event)
            else:
                self._see_progress(event)
        self.look()
        for stream in self._unfinished.values():
            if stream.was_aborted:
                raise BrokenRuleError(f"{stream.name} goes on after its client went away")
            used = (self.num_steps - stream.born_step) / self._patience.steps(stream.ahead, stream.passing)
            self.longest_share = max(self.longest_share, used)
            if used > 1.0:
                raise BrokenRuleError(f"{stream.name} starves: {self.num_steps - stream.born_step} steps, and no end")

    def look(self) -> None:
        """What holds between any two moves."""
        try:
            self._engine.scheduler.check()
        except ConservationError as error:
            raise BrokenRuleError(f"conservation: {error}") from error
        if self._device.violations:
            raise BrokenRuleError(f"an order that no backend can follow: {self._device.violations[0]}")

    def settled(self, step_id: int) -> None:
        """Its result was applied: whoever it harmed is told so."""
        for name in self._device.harmed.pop(step_id, ()):
            stream = self.streams[name]
            if stream.ended is None:
                raise BrokenRuleError(f"{name} goes on after step {step_id} failed it")

    def _see_progress(self, event: PrefillProgress) -> None:
        if (event.request_id, event.sample_index) not in self._unfinished:
            raise BrokenRuleError(f"progress of {event.request_id}, which is over")
        if not 0 < event.computed_tokens <= event.total_tokens:
            raise BrokenRuleError(f"progress of {event.request_id}: {event.computed_tokens} of {event.total_tokens}")

    def _see(self, event: TokenEvent) -> None:
        name = event.request_id, event.sample_index
        stream = self._unfinished.get(name)
        if stream is None:
            raise BrokenRuleError(f"{name} is told {event.token_ids} after its end")
        answer = stream.answer
        for token in event.token_ids:
            expected = answer.token(len(stream.tokens))
            if token != expected:
                raise BrokenRuleError(
                    f"{name} got token {token} at place {len(stream.tokens)}, and {expected} belongs there"
                )
            stream.tokens.append(token)
        self.num_tokens += len(event.token_ids)
        stream.text += event.text
        stream.prompt_places += [int(-told.logprob) for told in event.prompt_logprobs]
        if answer.request.sampling.logprobs is not None and len(event.logprobs) != len(event.token_ids):
            raise BrokenRuleError(f"{name} got {len(event.logprobs)} logprobs with {len(event.token_ids)} tokens")
        if event.finish_reason is not None:
            self._see_end(stream, event)

    def _see_end(self, stream: Stream, event: TokenEvent) -> None:
        name, answer, reason = stream.name, stream.answer, event.finish_reason
        stream.ended = reason
        del self._unfinished[name]
        if reason is FinishReason.ABORT:
            if not stream.was_aborted:
                raise BrokenRuleError(f"{name} was aborted by nobody")
        elif reason is FinishReason.ERROR:
            if not any(name in harmed for harmed in self._device.harmed.values()):
                raise BrokenRuleError(f"{name} failed by nobody's fault: {event.error}")
        else:
            answer.finish()
            if (stream.tokens, reason) != (answer.tokens, answer.finish_reason):
                raise BrokenRuleError(
                    f"{name} ended by {reason} with {len(stream.tokens)} tokens of {len(answer.tokens)}"
                )
            reports = answer.request.sampling.prompt_logprobs is not None and answer.sample_index == 0
            wanted = list(range(len(answer.request.prompt_token_ids) - 1)) if reports else []
            if stream.prompt_places != wanted:
                raise BrokenRuleError(f"{name} was told of the prompt's places {stream.prompt_places}")
            if self._engine._tokenizer is not None and (stream.text, event.stop_string) != (
                answer.shown,
                answer.stop_string,
            ):
                raise BrokenRuleError(f"{name} reads {stream.text!r} until {event.stop_string!r}, not {answer.shown!r}")
        timing = event.timing
        if timing is None or len(timing.token_times_s) != len(stream.tokens):
            raise BrokenRuleError(f"{name} got {len(stream.tokens)} tokens, and its timing is {timing}")

    # At the end

    def ended(self) -> None:
        """Everybody was told of an end, and everything was given back."""
        if self._unfinished:
            raise BrokenRuleError(f"{list(self._unfinished)} were never told of an end")
        scheduler = self._engine.scheduler
        counts, admission, ledger = scheduler.counts(), scheduler._admission, scheduler.ledger
        left = {
            "waiting": counts.waiting,
            "running": counts.running_prefill + counts.running_decode,
            "steps in flight": counts.steps_in_flight,
            "tokens to read": counts.prefill_backlog_tokens,
            "blocks in use": sum(group.used for group in counts.blocks),
            "chains": len(ledger._chains),
            "siblings": len(admission._first_samples),
            "marks": len(admission.waits._marks),
            "forecasts": len(scheduler._forecast._reading_s) + len(scheduler._forecast._num_cached),
            "flows": len(admission.waiting._flows) + len(getattr(scheduler._policy, "_number", ())),
            "those let in without a row": len(admission._arriving),
            "requests of the scheduler": len(scheduler._samples),
            "requests of the engine": len(self._engine._live) + len(self._engine._compiled),
            "texts": len(self._engine._streams) + len(self._engine._texts),
            "copies on their way": 0 if ledger.tiers is None else _on_their_way(ledger.tiers),
            "rows": len(set(self._device.rows) ^ set(admission.rows_to_close)),
        }
        if any(left.values()):
            raise BrokenRuleError(f"left over: { ({name: number for name, number in left.items() if number}) }")
        ledger.check([])


def _on_their_way(tiers: KVTiers) -> int:
    """Spills that no step has carried may wait for the next one."""
    return len(tiers._launched) + len(tiers._writing) + len(tiers._fetches) + len(tiers._given_up) + len(tiers._loads)
