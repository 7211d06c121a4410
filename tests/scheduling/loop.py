"""The engine's loop in small: a real Scheduler over the fake backend, checked after every move."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from tests.scheduling.fake_backend import FakeBackend, FakeBlocks, FakeTicket, expected_output, fake_format
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import FinishReason, Sequence
from twostroke.core.service_level import ServiceLevels
from twostroke.core.step import Drafts, Step
from twostroke.kv.ledger import KVLedger
from twostroke.kv.prefix_index import Digest
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.worth import Worth
from twostroke.scheduling.advance import SequenceAdvance
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.decode import TextEnds
from twostroke.scheduling.forecast import StepSeconds
from twostroke.scheduling.pace import PrefillPace
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.policies import DEFAULT_POLICY
from twostroke.scheduling.scheduler import Scheduler

VOCAB_SIZE = 32


def layout(*groups: tuple[int | None, int], block_size: int = 4, states: int | None = None) -> KVLayout:
    """Groups as (window, blocks); `states`: the slots of one more, of states."""
    kv_groups = tuple(KVGroup((layer,), *group) for layer, group in enumerate(groups))
    slots = () if states is None else (KVGroup((len(groups),), None, states, "state"),)
    return KVLayout(block_size, kv_groups + slots)


def request(
    name: str,
    prompt: list[int] | range,
    *,
    priority: int = 0,
    salt: str = "",
    eos: frozenset[int] = frozenset(),
    arrival_s: float = 0.0,
    seed: int = 0,
    tenant: str = "",
    call: str = "",
    level: str = "",
    **sampling: object,
) -> Request:
    sampling_params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), sampling_params, priority, eos, salt, arrival_s, seed, tenant, call, level)


@dataclass
class Record:
    """What the caller of the scheduler has seen of one sequence."""

    tokens: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    finished: int = 0


class RandomDrafting(Drafting):
    """Every number of drafts: left to the backend, or guessed from the tokens that the host knows, rightly or not."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._random = most, random.Random(seed)

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        count = self._random.randint(0, min(self._most, most))
        if count == 0 or self._random.random() < 0.5:
            return Drafts(count) if count else None
        known, num_known = sequence.output_token_ids, len(sequence.tokens)
        output = expected_output(sequence.request, sequence.sample_index, num_known + 16, VOCAB_SIZE)
        guesses = output[len(known) : len(known) + count + self._random.randint(0, 4)]
        if guesses and self._random.random() < 0.5:
            guesses[self._random.randrange(len(guesses))] += 1
        return Drafts(count, tuple(guesses), start=num_known)


class AlwaysWorth(Worth):
    """Whatever it costs, blocks are spilled."""

    def may_spill(self, seconds: float) -> bool:
        return True


class Loop:
    def __init__(
        self,
        kv_layout: KVLayout,
        *,
        depth: int = 0,
        digest: Digest | None = None,
        pace: PrefillPace | None = None,
        drafts: int = 0,
        drafting: Drafting | None = None,
        max_drafts: int | None = None,
        seed: int = 0,
        host_slots: int = 0,
        disk: DiskTier | None = None,
        worth: Worth | None = None,
        bytes_per_s: float = 1e3,
        policy: str = DEFAULT_POLICY,
        levels: ServiceLevels | None = None,
        step_seconds: StepSeconds | None = None,
        **config: object,
    ) -> None:
        """`drafts`: the most that a slot may have, at random, where nobody says how many. `host_slots`: of each KV
        group; 0: there are no tiers. `bytes_per_s`: of copies, so that loads take some turns or none."""
        config.setdefault("max_context", 64)
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        tiers = blocks = None
        if host_slots:
            slots = [host_slots] * len(kv_layout.groups)
            blocks = FakeBlocks(kv_layout, slots, bytes_per_s)
            tiers = KVTiers(HostTier(slots), fake_format(kv_layout), blocks, disk=disk, worth=worth or AlwaysWorth())
        key = None if disk is None else disk.key
        ledger = KVLedger(
            kv_layout,
            prefix_caching=self.config.prefix_caching,
            digest=digest,
            key=key,
            tiers=tiers,
            snapshot_tokens=self.config.snapshot_tokens,
        )
        if drafts and drafting is None:
            drafting = RandomDrafting(drafts, seed)
        self.scheduler = Scheduler(
            self.config,
            kv_layout,
            ledger=ledger,
            pace=pace,
            drafting=drafting,
            max_drafts=max_drafts,
            policy=policy,
            levels=levels,
            step_seconds=step_seconds,
        )
        self.backend = FakeBackend(
            kv_layout,
            max_context=self.config.max_context,
            vocab_size=VOCAB_SIZE,
            max_tokens_per_step=self.config.max_tokens_per_step,
            caching=self.config.prefix_caching,
            seed=seed,
        )
        self.backend.blocks = blocks
        self.depth = depth
        self.now_s = 0.0
        self.in_flight: deque[tuple[Step, FakeTicket]] = deque()
        self.records: dict[Sequence, Record] = {}

    def add(self, new: Request) -> list[Sequence]:
        sequences = self.scheduler.add(new)
        self.records |= {sequence: Record() for sequence in sequences}
        return sequences

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.records if not sequence.is_finished]

    def launch(self) -> Step | None:
        self.now_s += 1.0
        step = self.scheduler.schedule(self.now_s)
        if step is None:
            # Nothing to launch is only right when results are awaited or nobody is left.
            tiers = self.scheduler.ledger.tiers
            waits = tiers is not None and tiers.num_fetching
            assert self.in_flight or not self.unfinished or waits, "an empty step while work can run"
            if waits and not self.in_flight:
                self.scheduler.wait_for_tiers(10.0)
        else:
            self._check_ranges(step)
            self.in_flight.append((step, self.backend.launch(step)))
        self.scheduler.check()
        return step

    def _check_ranges(self, step: Step) -> None:
        """A row stands where the host's range says that it may: exactly there, where no drafts are in flight."""
        by_id = {sequence.seq_id: sequence for sequence in self.records}
        for slot in step.decodes:
            sequence = by_id[slot.seq_id]
            least = sequence.least_next_position - 1
            position = self.backend.rows[slot.seq_id].position
            assert position <= slot.position == sequence.next_position - slot.num_queries
            assert least <= position or slot.seq_id in self.backend.errors

    def settle(self, text_ends: TextEnds | None = None) -> list[SequenceAdvance]:
        """Apply the oldest result."""
        self.now_s += 1.0
        step, ticket = self.in_flight.popleft()
        advances = self.scheduler.apply(step, ticket.result(), self.now_s, text_ends=text_ends)
        for advance in advances:
            record = self.records[advance.sequence]
            record.tokens += [token.token_id for token in advance.sampled]
            record.prompt_positions += [int(-item.logprob) for item in advance.prompt_logprobs]
            record.finished += advance.finished
        self.scheduler.check()
        return advances

    def move(self) -> Step | None:
        """Launch one step and apply it; returns the step."""
        step = self.launch()
        if step is not None:
            self.settle()
        return step

    def turn(self) -> list[SequenceAdvance]:
        """As the engine does: launch, run up to `depth` steps ahead, apply."""
        step = self.launch()
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            return self.settle()
        return []

    def run(self, max_turns: int = 10_000) -> None:
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work, "it does not come to an end"
        self.check_idle()

    def check_idle(self) -> None:
        """Everything was given back."""
        assert not self.in_flight and not self.unfinished
        self.scheduler.ledger.check([])
        counts = self.scheduler.counts()
        assert (counts.waiting, counts.running_prefill, counts.running_decode, counts.steps_in_flight) == (0, 0, 0, 0)
        assert all(group.used == 0 for group in counts.blocks)
        assert set(self.backend.rows) == set(self.scheduler._admission.rows_to_close)
        assert not self.scheduler.ledger._chains and not self.scheduler._admission._first_samples

    def check_output(self, sequence: Sequence) -> None:
        """It got exactly the tokens that it gets alone, or, ended from outside, the first of them."""
        expected = expected_output(sequence.request, sequence.sample_index, sequence.max_total_tokens, VOCAB_SIZE)
        record = self.records[sequence]
        assert sequence.output_token_ids == record.tokens
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert record.tokens == expected[: len(record.tokens)]
            return
        assert record.tokens == expected
        assert record.finished == 1
        stopped = expected[-1] in sequence.request.stop_ids
        assert sequence.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        reports = sequence.request.sampling.prompt_logprobs is not None and sequence.sample_index == 0
        assert record.prompt_positions == (list(range(sequence.prompt_len - 1)) if reports else [])
        assert len(sequence.timing.token_times_s) == len(record.tokens)

    def check_outputs(self) -> None:
        for sequence in self.records:
            self.check_output(sequence)
