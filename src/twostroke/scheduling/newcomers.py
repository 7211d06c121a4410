"""What a request may expect when it arrives: how much of its prompt need not be read, what it is promised, and when its
first token should come. Refuses a request that would be late, if its class wants that. Knows forecasts and who is
there, and changes neither."""

from __future__ import annotations

from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason, Sequence, SequenceState
from twostroke.core.service_level import ServiceLevel
from twostroke.core.timing import SequenceTiming
from twostroke.kv.handing import Handing
from twostroke.kv.ledger import KVLedger
from twostroke.kv.recall import load_seconds
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.decode import TextEnds, finish_reason
from twostroke.scheduling.forecast import Forecast, nominal_seconds
from twostroke.scheduling.places import Places
from twostroke.scheduling.prefill import PrefillPlanner
from twostroke.scheduling.promises import Promises
from twostroke.scheduling.sent_work import SentWork
from twostroke.scheduling.staying import Staying, Writer

TOO_SHORT = "it is shorter than a block of KV"
SOONER_THERE = "a handoff would take longer than to read it where it is written"


def samples_of(request: Request, first_seq_id: int, max_total_tokens: int) -> list[Sequence]:
    """Returns one Sequence for each sample, numbered from `first_seq_id` on."""
    asked = request.sampling.speculation
    samples = []
    for sample_index in range(request.sampling.n):
        timing = SequenceTiming(
            arrival_s=request.arrival_s,
            elsewhere_s=0.0 if request.handoff is None else request.handoff.before_s,
            prompt_tokens=len(request.prompt_token_ids),
            wants_no_drafts=asked is not None and asked.is_off,
        )
        tokens = list(request.prompt_token_ids)
        if request.first is not None:  # known, and not computed: as after a preemption
            tokens.append(request.first.token_id)
            timing.first_came, timing.token_times_s = True, [request.arrival_s]
        seq_id = first_seq_id + sample_index
        samples.append(Sequence(seq_id, request, sample_index, max_total_tokens, tokens, timing=timing))
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
        """`staying` decides whether a prompt is read here for another engine at all. None means that each is."""
        self._ledger = ledger
        self._staying, self._sent = staying, SentWork()
        self._forecast = forecast
        self._promises = promises
        self._gaps, self._growth = admission.gaps, admission.growth
        self._places = Places(ledger, forecast, admission)
        self._prefills = prefills

    def let_in(self, level: ServiceLevel, samples: list[Sequence], text_ends: TextEnds | None = None) -> bool:
        """Gives samples the promise of their class, and returns whether they wait here. If they do not, they are over:
        their prompt is left to another engine, however late it would be here, or the first token, which came with it,
        ended the answer. `text_ends` is asked about that token. Raises PromiseError if they would be late here, and
        their class refuses that."""
        load_s = self._promise(level, samples)
        if samples[0].request.lease_id and (why := self._stays(samples[0])) is not None:
            self._leave(samples, why)
            return False
        self._turn_away_late(level, samples, load_s)
        return samples[0].request.first is None or not self._is_over(samples[0], text_ends)

    def _is_over(self, sequence: Sequence, text_ends: TextEnds | None) -> bool:
        """Whether the token that came with its prompt ended the answer. Then the sequence is over before it began
        here."""
        token_id, handing = sequence.tokens[-1], self._ledger.handing
        reason = finish_reason(sequence, token_id, len(sequence.tokens))
        if text_ends is not None and text_ends(sequence, token_id):
            reason = FinishReason.STOP
        if reason is None:
            return False
        if handing is not None:
            handing.end_unfetched(sequence)
        self._growth.note_length(sequence)
        sequence.state, sequence.finish_reason = SequenceState.FINISHED, reason
        sequence.timing.finished_s = sequence.request.arrival_s
        return True

    def _promise(self, level: ServiceLevel, samples: list[Sequence]) -> float:
        """Gives samples their promise, and tells the forecast what they have to read. Sample 0 reads the prompt for
        all, except for what the prefix cache or a tier has of it. Returns the seconds to load that part."""
        first, forecast = samples[0], self._forecast
        num_held, load_s = self._held(first)
        # If another engine has read the prompt, promised time counts from there: as if one engine had read all of it.
        promise = self._promises.promise_to(level, load_s + forecast.prefill_s(num_held, len(first.tokens)))
        num_held, load_s = self._handed_over(first) or (num_held, load_s)
        forecast.expect(first, num_held)
        for sequence in samples:
            sequence.timing.promise = promise
        for sibling in samples[1:]:
            forecast.expect(sibling, sibling.prompt_len - 1)
        return load_s

    def _turn_away_late(self, level: ServiceLevel, samples: list[Sequence], load_s: float) -> None:
        """Raises PromiseError if a request would break its promise, and its class refuses that."""
        if level.when_late == "refuse":
            first, number = samples[0], len(samples)
            self._promises.refuse_uneven(level, self._gaps.alone_s(first))
            if first.num_output:
                return  # its first token is there: nothing that is left to do makes it later
            predicted_s = load_s + self._first_token_s(first, number)
            alone_s, gone_s = load_s + self._places.alone_s(first, number), first.timing.elsewhere_s
            self._promises.refuse_late(level, predicted_s, alone_s, number, gone_s)

    def _stays(self, newcomer: Sequence) -> str | None:
        """Returns why a prompt that another engine will answer is left to be read there, in a sentence. None means that
        it is read here. Nobody tells this engine what runs there, but what was sent there of late has to be read
        first."""
        handing, staying = self._ledger.handing, self._staying
        if handing is None or staying is None:
            return None
        writer, why = self._writer(handing, newcomer), None
        move_s = handing.would_move(newcomer)
        if move_s is None:
            why = TOO_SHORT
        elif self._forecast.step_seconds is nominal_seconds:
            return None
        else:
            first_s = staying.first_step_s(newcomer.prompt_len, None)
            elsewhere_s = self._first_token_s(newcomer) + move_s + first_s
            why = SOONER_THERE if staying.stays(newcomer.prompt_len, writer, elsewhere_s) else None
        added_s = writer.reading_s if why else staying.added_s(newcomer.prompt_len)
        self._sent.note(newcomer.request.writer, added_s, newcomer.request.arrival_s)
        return why

    def _writer(self, handing: Handing, newcomer: Sequence) -> Writer:
        """Returns what is known here of the engine that will write the answer."""
        request, num_cached = newcomer.request, handing.num_at_writer(newcomer)
        reading_s = self._forecast.prefill_s(num_cached, newcomer.prompt_len)
        return Writer(num_cached, reading_s, None, self._sent.ahead_s(request.writer, request.arrival_s))

    def _leave(self, samples: list[Sequence], why: str) -> None:
        """Ends samples before they began: the engine that writes the answer reads the prompt."""
        assert self._ledger.handing is not None
        self._ledger.handing.leave(samples[0], why)
        for sequence in samples:
            sequence.state, sequence.finish_reason = SequenceState.FINISHED, FinishReason.LENGTH
            sequence.timing.finished_s, sequence.timing.is_left = sequence.request.arrival_s, True

    def _handed_over(self, newcomer: Sequence) -> tuple[int, float] | None:
        """Returns the same as `_held`, with what another engine has read of the prompt. None means that nothing comes
        from there."""
        handing = self._ledger.handing
        return None if handing is None else handing.expected(newcomer)

    def _held(self, newcomer: Sequence) -> tuple[int, float]:
        """Returns how many of its tokens need not be read, and the seconds to load those that the device does not hold.
        This is what `KVLedger.recall` would do now, without doing it."""
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
        """Returns the seconds from now to the first token of the last of its samples."""
        self._prefills.note_streams()
        return self._places.first_token_s(newcomer, num_samples)
