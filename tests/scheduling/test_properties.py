"""Random work over random layouts, one token a slot or up to eight: conservation after every move, exact outputs, no
starvation, an empty house at the end. The fake backend checks every key that is read; `Loop` checks the ledger, the
ranges of what is in flight, and that no step is empty in vain."""

from __future__ import annotations

from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.properties import examples
from tests.scheduling.loop import VOCAB_SIZE, Loop, layout, request
from twostroke.core.errors import BadRequestError
from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason

windows = st.one_of(st.none(), st.integers(1, 11))


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    block_size = draw(st.integers(1, 4))
    groups = draw(st.lists(st.tuples(windows, st.integers(3, 14)), min_size=1, max_size=3))
    states = draw(st.sampled_from([None, None, 1, 2, 3, 6, 12]))
    return layout(*groups, block_size=block_size, states=states)


configs = st.fixed_dictionaries(
    {
        "max_tokens_per_step": st.integers(1, 24),
        "max_running": st.integers(1, 6),
        "max_chunk_tokens": st.one_of(st.none(), st.integers(1, 7)),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "snapshot_tokens": st.sampled_from([1, 1, 5, 9, 100]),
        "kv_watermark": st.sampled_from([0.0, 0.01, 0.3]),
        "priority_aging_s": st.sampled_from([0.0, 1.0, 20.0]),
        "depth": st.integers(0, 2),
        "drafts": st.sampled_from([0, 0, 1, 3, 7]),
        "seed": st.integers(0, 99),
        "host_slots": st.sampled_from([0, 0, 1, 3, 9, 30]),
        "bytes_per_s": st.sampled_from([1.0, 10.0, 1e3]),
        # One bit of hash makes collisions the rule: only the comparison of tokens is left to keep prefixes apart.
        "digest": st.sampled_from([None, None, lambda before, tokens: bytes([(sum(before) + sum(tokens)) % 2])]),
    }
)


@st.composite
def requests(draw: st.DrawFn, name: str, now_s: float) -> Request:
    """Prompts of few distinct tokens, so that prefixes are often shared."""
    prompt = draw(st.lists(st.integers(0, 1), max_size=2)) + list(range(draw(st.integers(1, 16))))
    return request(
        name,
        prompt,
        priority=draw(st.integers(-2, 2)),
        salt=draw(st.sampled_from(["", "", "", "other"])),
        eos=frozenset({3}) if draw(st.booleans()) else frozenset(),
        arrival_s=now_s,
        seed=draw(st.integers(0, 3)),
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
        call=draw(st.sampled_from(["", "", "first", "second", name])),
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 12))),
        min_tokens=draw(st.sampled_from([0, 0, 1])),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Any interleaving of arrivals, launches, results, aborts, early finishes, errors, failing steps and forgetting."""

    loop: Loop

    @initialize(kv_layout=layouts(), config=configs)
    def start(self, kv_layout: KVLayout, config: dict[str, object]) -> None:
        self.loop = Loop(kv_layout, max_context=28, **config)  # type: ignore[arg-type]
        self.num_added = 0
        self.failed: set[int] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.num_added += 1
        try:
            self.loop.add(data.draw(requests(f"r{self.num_added}", self.loop.now_s)))
        except BadRequestError as error:
            assert "tokens" in str(error)

    @rule(times=st.integers(1, 8))
    def turns(self, times: int) -> None:
        for _ in range(times):
            self.loop.turn()

    @precondition(lambda self: len(self.loop.in_flight) <= self.loop.depth)
    @rule()
    def launch(self) -> None:
        self.loop.launch()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def settle(self) -> None:
        self.loop.settle()

    @precondition(lambda self: self.loop.unfinished)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def end_one(self, data: st.DataObject, reason: FinishReason) -> None:
        sequence = data.draw(st.sampled_from(self.loop.unfinished))
        assert self.loop.scheduler.finish(sequence, reason, "no reason")
        assert not self.loop.scheduler.finish(sequence, FinishReason.STOP)
        assert sequence.finish_reason is reason

    @precondition(lambda self: self.loop.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.loop.unfinished)).request.request_id
        assert self.loop.scheduler.abort(request_id)
        assert not self.loop.scheduler.abort(request_id)

    @precondition(lambda self: self.loop.unfinished)
    @rule(data=st.data())
    def break_logits(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.loop.unfinished))
        self.loop.backend.errors[sequence.seq_id] = "not finite"
        self.failed.add(sequence.seq_id)

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def fail_step(self) -> None:
        step, _ = self.loop.in_flight.popleft()
        for advance in self.loop.scheduler.fail(step, "the device is gone", self.loop.now_s):
            assert advance.sequence.finish_reason is FinishReason.ERROR and advance.finished
            self.failed.add(advance.sequence.seq_id)

    @rule()
    def clear_prefixes(self) -> None:
        self.loop.scheduler.clear_prefixes()
        assert all(group.cached == 0 for group in self.loop.scheduler.counts().blocks)
        tiers = self.loop.scheduler.ledger.tiers
        assert tiers is None or not len(tiers.host)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run()
            self.loop.check_outputs()
            for sequence in self.loop.records:
                if sequence.finish_reason is FinishReason.ERROR and sequence.error != "no reason":
                    assert sequence.seq_id in self.failed


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = examples(60, stateful_step_count=30, allowed=tuple(HealthCheck))


@examples(60)
@given(data=st.data(), kv_layout=layouts(), config=configs)
def test_every_request_finishes_with_the_tokens_it_gets_alone(
    data: st.DataObject, kv_layout: KVLayout, config: dict[str, object]
) -> None:
    """Through chunks, prefix hits, preemption and resumption, batches of any make-up, any run-ahead, and any number of
    drafts that hold."""
    loop = Loop(kv_layout, max_context=28, **config)  # type: ignore[arg-type]
    for number in range(data.draw(st.integers(1, 12))):
        try:
            loop.add(data.draw(requests(f"r{number}", loop.now_s)))
        except BadRequestError:
            continue
        for _ in range(data.draw(st.integers(0, 6))):
            loop.turn()
    loop.run()
    loop.check_outputs()
    assert all(sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for sequence in loop.records)


@examples(25)
@given(
    priority=st.integers(0, 4),
    aging_s=st.sampled_from([0.5, 5.0, 30.0]),
    num_blocks=st.integers(6, 12),
    depth=st.integers(0, 1),
    max_running=st.integers(1, 4),
)
def test_none_starves_under_an_endless_stream_of_more_urgent_work(
    priority: int, aging_s: float, num_blocks: int, depth: int, max_running: int
) -> None:
    """One more urgent request arrives whenever one finishes: under strict priorities the first would never run."""
    loop = Loop(layout((None, num_blocks)), depth=depth, max_running=max_running, priority_aging_s=aging_s)
    patient = loop.add(request("patient", range(9), priority=priority, max_tokens=5))[0]
    for number in range(2_000):
        if patient.is_finished:
            break
        while len(loop.unfinished) < 6:
            name = f"urgent{number}.{len(loop.unfinished)}"
            loop.add(request(name, range(7), priority=-1, arrival_s=loop.now_s, max_tokens=6, seed=number))
        loop.turn()
    assert patient.is_finished, "the patient request starved"
    # It is passed by what arrived within its handicap, and by what that leaves running; not by more.
    assert patient.timing.queue_s is not None
    assert patient.timing.queue_s <= (priority + 1) * aging_s + 250
    loop.check_output(patient)


@examples(40)
@given(
    data=st.data(),
    num_blocks=st.integers(12, 40),
    depth=st.integers(0, 1),
    max_running=st.integers(3, 6),
    priority=st.integers(-100, 0),
)
def test_no_flood_of_another_tenant_or_call_keeps_a_short_request_waiting(
    data: st.DataObject, num_blocks: int, depth: int, max_running: int, priority: int
) -> None:
    """However much one tenant has sent, however long its answers and however urgent it calls them, what another asks
    is let in next, and at once where only a slot is wanting. Of one tenant's calls the same holds for equal
    priorities."""
    loop = Loop(layout((None, num_blocks)), depth=depth, max_running=max_running, max_context=28, kv_watermark=0.0)
    is_tenant = data.draw(st.booleans())
    flood = {"tenant": "flood", "priority": priority} if is_tenant else {"tenant": "", "priority": 0}
    for number in range(14):
        call = ["one", "two"][number % 2]
        loop.add(request(f"flood{number}", range(6), call=call, max_tokens=16, seed=number, **flood))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(4, 20))):  # the slots are taken
        loop.turn()
    tenant = "other" if is_tenant else ""
    short = loop.add(request("short", range(3), tenant=tenant, call="short", arrival_s=loop.now_s, max_tokens=2))[0]
    arrived_s, num_turns = loop.now_s, 0
    while short.timing.scheduled_s is None:
        loop.turn()
        num_turns += 1
        assert num_turns < 200
    began_s = [sequence.timing.scheduled_s or 0.0 for sequence in loop.records]
    assert not any(arrived_s < other_s < short.timing.scheduled_s for other_s in began_s), "it was passed"
    if loop.scheduler.counts().preemptions == sum(sequence.timing.gave_way for sequence in loop.records):
        assert num_turns <= 2 + depth  # no KV ran out: nothing but a slot was waited for
    loop.run()
    loop.check_outputs()
