"""What a request may expect when it comes: how much of its prompt need not be read, what it is promised, and when its
first token should come. Refuses what would be late, where its class wants that. Knows forecasts and who is there;
changes neither."""

from __future__ import annotations

from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason, Sequence, SequenceState
from twostroke.core.service_level import ServiceLevel
from twostroke.core.timing import SequenceTiming
from twostroke.kv.ledger import KVLedger
from twostroke.kv.recall import load_seconds
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.forecast import Forecast, nominal_seconds
from twostroke.scheduling.places import Places
from twostroke.scheduling.prefill import PrefillPlanner
from twostroke.scheduling.promises import Promises, refuse_late, refuse_uneven
from twostroke.scheduling.staying import Staying, Writer

TOO_SHORT = "it is shorter than a block of KV"
SOONER_THERE = "a handoff would take longer than to read it where it is written"


def samples_of(request: Request, first_seq_id: int, max_total_tokens: int) -> list[Sequence]:
    """One Sequence a sample, numbered from `first_seq_id` on."""
    asked = request.sampling.speculation
    samples = []
    for sample_index in range(request.sampling.n):
        timing = SequenceTiming(
            arrival_s=request.arrival_s,
            elsewhere_s=0.0 if request.handoff is None else request.handoff.before_s,
            prompt_tokens=len(request.prompt_token_ids),
            wants_no_drafts=asked is not None and asked.is_off,
        )
        samples.append(Sequence(first_seq_id + sample_index, request, sample_index, max_total_tokens, timing=timing))
    return samples


class Newcomers:
    def __init__(
        self,
        ledger: KVLedger,
        forecast: Forecast,
        promises: Promises,
        admission: Admission,
        prefills: PrefillPlanner,
        staying: Staying | None = None,
    ) -> None:
        """`staying`: by what it is decided whether a prompt is read for another engine at all; None: each is."""
        self._ledger = ledger
        self._staying = staying
        self._forecast = forecast
        self._promises = promises
        self._gaps = admission.gaps
        self._places = Places(ledger, forecast, admission)
        self._prefills = prefills

    def promise(self, level: ServiceLevel, samples: list[Sequence]) -> None:
        """Sample 0 reads the prompt for all, but for what the prefix cache or a tier has of it. Raises PromiseError."""
        first, forecast = samples[0], self._forecast
        num_held, load_s = self._held(first)
        # Of a prompt that another engine has read, what is promised counts from there: as if one had read all of it.
        promise = self._promises.promise_to(level, load_s + forecast.prefill_s(num_held, len(first.tokens)))
        num_held, load_s = self._handed_over(first) or (num_held, load_s)
        forecast.expect(first, num_held)
        for sequence in samples:
            sequence.timing.promise = promise
        if level.when_late == "refuse" and forecast.is_trusted:
            number = len(samples)
            refuse_uneven(level, self._gaps.alone_s(first))
            predicted_s = load_s + self._first_token_s(first, number)
            refuse_late(level, predicted_s, load_s + self._places.alone_s(first, number), number)
        for sibling in samples[1:]:
            forecast.expect(sibling, sibling.prompt_len - 1)

    def stays(self, newcomer: Sequence) -> str | None:
        """Why a prompt that another engine will answer is read there, in a sentence; None: it is read here. Nobody says
        what runs there: a stream as long as this prompt, say, and nothing to read."""
        handing, staying, forecast = self._ledger.handing, self._staying, self._forecast
        if handing is None or staying is None:
            return None
        move_s, prompt_tokens = handing.would_move(newcomer), newcomer.prompt_len
        if move_s is None:
            return TOO_SHORT
        if forecast.step_seconds is nominal_seconds:
            return None
        num_cached, contexts = handing.num_at_writer(newcomer), [prompt_tokens]
        writer = Writer(num_cached, forecast.prefill_s(num_cached, prompt_tokens), contexts)
        first_s = staying.first_step_s(prompt_tokens, contexts)
        elsewhere_s = self._first_token_s(newcomer) + move_s + first_s
        return SOONER_THERE if staying.stays(prompt_tokens, writer, elsewhere_s) else None

    def leave(self, samples: list[Sequence], why: str) -> None:
        """They are over before they began: whoever writes the answer reads the prompt."""
        assert self._ledger.handing is not None
        self._ledger.handing.leave(samples[0], why)
        for sequence in samples:
            sequence.state, sequence.finish_reason = SequenceState.FINISHED, FinishReason.LENGTH
            sequence.timing.finished_s = sequence.request.arrival_s

    def _handed_over(self, newcomer: Sequence) -> tuple[int, float] | None:
        """The same, with what another engine has read of it; None: nothing comes from there."""
        handing = self._ledger.handing
        return None if handing is None else handing.expected(newcomer)

    def _held(self, newcomer: Sequence) -> tuple[int, float]:
        """Its tokens that are to be had without reading, and the seconds to load what the device does not hold of them:
        what `KVLedger.recall` would do now, without doing it."""
        match, tiers = self._ledger.match(newcomer), self._ledger.tiers
        if tiers is None:
            return match.num_tokens, 0.0
        for with_disk in (True, False) if tiers.may_fetch(newcomer.seq_id) else (False,):
            longer = self._ledger._matcher.match_beyond(newcomer, tiers, with_disk=with_disk)
            num_more, load_s = longer.num_tokens - match.num_tokens, load_seconds(tiers, longer)
            if num_more > 0 and tiers.worth.loads(match.num_tokens, num_more, load_s):
                return longer.num_tokens, load_s
        return match.num_tokens, 0.0

    def _first_token_s(self, newcomer: Sequence, num_samples: int = 1) -> float:
        """From now to the first token of the last of its samples."""
        self._prefills.note_streams()
        return self._places.first_token_s(newcomer, num_samples)
