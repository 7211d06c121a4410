"""The loop over a real host backend whose steps go wrong: in the forward pass, at launch, or by Ctrl-C. The next token
is the token plus one, so every answer that is not hit by a failure is known."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.properties import examples

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend, HostTicket
from twostroke.core.errors import BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step
from twostroke.engine.engine import Engine
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

VOCAB = 50
LAYOUT = KVLayout(block_size=4, groups=(KVGroup((0,), None, 14),))


class Successor(HostBackend):
    name = "successor"

    def __init__(self, broken_forwards: frozenset[int] = frozenset(), broken_launches: frozenset[int] = frozenset()):
        super().__init__(LAYOUT, max_context=40, vocab_size=VOCAB)
        self.broken_forwards, self.broken_launches = broken_forwards, broken_launches
        self.num_forwards = self.num_launches = 0
        self.is_running, self.may_run = threading.Event(), threading.Event()
        self.may_run.set()

    def launch(self, step: Step) -> HostTicket:
        self.num_launches += 1
        if self.num_launches in self.broken_launches:
            raise RuntimeError("no launch")
        return super().launch(step)

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.is_running.set()
        assert self.may_run.wait(timeout=120)
        self.num_forwards += 1
        if self.num_forwards in self.broken_forwards:
            raise ZeroDivisionError
        logits = np.zeros((len(batch.logit_rows), VOCAB), dtype=np.float32)
        logits[np.arange(len(logits)), (batch.token_ids[batch.logit_rows] + 1) % VOCAB] = 5.0
        return logits


def engine_over(backend: HostBackend, *, run_ahead: bool = True) -> Engine:
    config = SchedulerConfig(max_context=40, max_tokens_per_step=8, max_running=6)
    scheduler = Scheduler(config, LAYOUT, policy="fifo")  # who gives way is not the clock's affair
    return Engine(scheduler, backend, VOCAB, run_ahead=run_ahead)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


class Answers:
    """What each request got: its tokens, and how it ended (exactly once)."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[str, str | None]] = {}

    def drain(self, engine: Engine) -> None:
        while engine.busy:
            self.step(engine)
            engine.scheduler.check()

    def step(self, engine: Engine) -> None:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                assert event.request_id not in self.ends
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    self.ends[event.request_id] = (event.finish_reason.value, event.error)


def following(last: int, count: int) -> list[int]:
    return [(last + 1 + offset) % VOCAB for offset in range(count)]


def assert_nothing_left(engine: Engine, backend: HostBackend) -> None:
    """No block, no stream, and after one more request only that one's row."""
    counts = engine.scheduler.counts()
    assert (counts.waiting, counts.running_prefill, counts.running_decode, counts.steps_in_flight) == (0, 0, 0, 0)
    assert counts.blocks[0].used == 0
    backend.broken_forwards = backend.broken_launches = frozenset()
    answers = Answers()
    engine.add(Request("afterwards", (7, 8, 9), greedy(3)))
    answers.drain(engine)
    assert answers.tokens["afterwards"] == [10, 11, 12]
    assert len(backend.rows) == 1


@pytest.fixture
def closing() -> Iterator[list[HostBackend]]:
    backends: list[HostBackend] = []
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture
def backend(closing: list[HostBackend]) -> Successor:
    backend = Successor()
    closing.append(backend)
    return backend


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("broken", [1, 2, 3, 5])
@pytest.mark.parametrize("where", ["forward", "launch"])
def test_a_failed_step_ends_its_requests_and_no_other(
    closing: list[HostBackend], where: str, broken: int, run_ahead: bool
) -> None:
    backend = Successor(**{f"broken_{where}{'s' if where == 'forward' else 'es'}": frozenset({broken})})
    closing.append(backend)
    engine = engine_over(backend, run_ahead=run_ahead)
    answers = Answers()
    engine.add(Request("early", (1, 2, 3), greedy(12)))
    while engine.busy and not answers.ends:
        answers.step(engine)
        engine.scheduler.check()
    engine.add(Request("late", (20, 21), greedy(6)))
    answers.drain(engine)
    reason, error = answers.ends["early"]
    assert reason == "error"
    assert error is not None and ("no launch" if where == "launch" else "ZeroDivisionError") in error
    assert answers.tokens["early"] == following(3, len(answers.tokens["early"]))
    assert len(answers.tokens["early"]) == broken - 1
    assert answers.ends["late"] == ("length", None)
    assert answers.tokens["late"] == following(21, 6)
    assert_nothing_left(engine, backend)


@examples(60)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=7),
    broken_forwards=st.frozensets(st.integers(1, 25), max_size=3),
    broken_launches=st.frozensets(st.integers(1, 25), max_size=3),
    aborts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=3),
    run_ahead=st.booleans(),
)
def test_any_failures_leave_the_books_right(
    prompts: list[list[int]],
    broken_forwards: frozenset[int],
    broken_launches: frozenset[int],
    aborts: list[tuple[int, int]],
    run_ahead: bool,
) -> None:
    """14 blocks of 4 for up to 7 prompts: preemption, prefix hits and failures meet."""
    backend = Successor(broken_forwards, broken_launches)
    engine = engine_over(backend, run_ahead=run_ahead)
    answers = Answers()
    try:
        for index, prompt in enumerate(prompts):
            engine.add(Request(str(index), tuple(prompt), greedy(12)))
        steps = 0
        while engine.busy:
            for index, at_step in aborts:
                if at_step == steps:
                    engine.abort(str(index))
            answers.step(engine)
            engine.scheduler.check()
            steps += 1
            assert steps < 500
        assert set(answers.ends) == {str(index) for index in range(len(prompts))}
        for index, prompt in enumerate(prompts):
            reason, _ = answers.ends[str(index)]
            tokens = answers.tokens[str(index)]
            assert tokens == following(prompt[-1], len(tokens))
            assert reason in ("error", "abort") or (reason, len(tokens)) == ("length", 12)
            if not (broken_forwards or broken_launches or aborts):
                assert reason == "length"
        assert_nothing_left(engine, backend)
    finally:
        backend.close()


def test_ctrl_c_while_waiting_loses_nothing(backend: Successor) -> None:
    engine = engine_over(backend)
    answers = Answers()
    engine.add(Request("kept", (1, 2, 3), greedy(5)))
    backend.may_run.clear()

    def press_ctrl_c() -> None:
        if backend.is_running.wait(120):  # the step is launched, and waited for now or in a moment
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        pressing.start()
        engine.step()
    pressing.join()
    backend.may_run.set()
    engine.scheduler.check()
    answers.drain(engine)
    assert answers.tokens["kept"] == [4, 5, 6, 7, 8], answers.ends
    assert_nothing_left(engine, backend)


def test_ctrl_c_in_the_bookkeeping_comes_after_it(backend: Successor, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(backend)
    answers = Answers()
    engine.add(Request("kept", (1, 2, 3), greedy(5)))
    apply = engine.scheduler.apply

    def interrupted(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(engine.scheduler, "apply", apply)
        return apply(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.scheduler, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    answers.drain(engine)
    assert answers.tokens["kept"] == [4, 5, 6, 7, 8]  # the first token was learned before the interrupt
    assert_nothing_left(engine, backend)


def test_limits_of_length_and_context(backend: Successor) -> None:
    engine = engine_over(backend)
    answers = Answers()
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    for name, prompt, sampling in [
        ("one token", (1,), greedy(1)),
        ("one place left", tuple(range(39)), endless),
        ("to the end of the context", (5, 6), endless),
    ]:
        engine.add(Request(name, prompt, sampling, eos_token_ids=frozenset({9})))
    with pytest.raises(BadRequestError, match=r"40 tokens, and max_context is 40"):
        engine.add(Request("full", tuple(range(40)), endless))
    engine.abort("nobody")
    answers.drain(engine)
    assert {name: end[0] for name, end in answers.ends.items()} == dict.fromkeys(answers.ends, "length")
    assert answers.tokens["one token"] == [2]
    assert answers.tokens["one place left"] == [39]
    assert answers.tokens["to the end of the context"] == following(6, 38)
    assert_nothing_left(engine, backend)


def test_abort_in_the_middle_of_a_prefill(backend: Successor) -> None:
    engine = engine_over(backend)
    answers = Answers()
    engine.add(Request("long", tuple(range(30)), greedy(4)))
    answers.step(engine)
    engine.abort("long")
    engine.abort("long")
    answers.drain(engine)
    assert answers.ends == {"long": ("abort", None)}
    assert answers.tokens["long"] == []
    assert_nothing_left(engine, backend)


def test_salts_keep_prefixes_apart(backend: Successor) -> None:
    engine = engine_over(backend)
    cached = {}
    for name, salt in [("a", "ann"), ("b", "bob"), ("a again", "ann"), ("none", "")]:
        engine.add(Request(name, tuple(range(12)), greedy(1), cache_salt=salt))
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent) and event.timing is not None:
                    cached[name] = event.timing.cached_tokens
    assert cached == {"a": 0, "b": 0, "a again": 8, "none": 0}
