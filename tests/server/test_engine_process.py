"""The engine's loop between its messages: grammars are compiled beside the steps, and nobody else's tokens wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import Event, TokenEvent
from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import FinishReason
from twostroke.engine.build import Assembly, build
from twostroke.server import messages as m
from twostroke.server import watch_events as w
from twostroke.server.engine_process import EngineLoop
from twostroke.server.heartbeat import Heart
from twostroke.server.step_watch import StepWatch

LIMIT_S = 120.0
PLAIN = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, speculation="off")
DIGIT = SamplingParams(temperature=0.0, max_tokens=4, grammar=GrammarSpec("regex", "[0-9]"))


class Api:
    """The other end of the pipe."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.heard: list[m.FromEngine] = []

    def send(self, message: m.ToEngine) -> None:
        self._socket.send(m.encode(message))

    def outputs(self, request_id: str) -> list[TokenEvent]:
        steps = [message for message in self.heard if isinstance(message, m.StepOutputs)]
        return [output for step in steps for output in step.outputs if output.request_id == request_id]

    def listen(self, limit_s: float = LIMIT_S) -> None:
        if self._socket.poll(int(limit_s * 1e3)):
            self.heard.append(m.decode_from_engine(self._socket.recv()))

    def wait_for(self, request_id: str, num_outputs: int) -> list[TokenEvent]:
        end_s = time.monotonic() + LIMIT_S
        while len(self.outputs(request_id)) < num_outputs:
            assert time.monotonic() < end_s
            self.listen()
        return self.outputs(request_id)


@contextmanager
def running_loop(assembly: Assembly) -> Iterator[Api]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.PAIR) for _ in range(2)]
    for socket in sockets:
        socket.set_hwm(0)
    sockets[0].bind("inproc://engine")
    sockets[1].connect("inproc://engine")
    beats, heart = os.pipe()
    thread = threading.Thread(target=EngineLoop(assembly, sockets[0], Heart(heart)).run)
    thread.start()
    try:
        yield Api(sockets[1])
    finally:
        sockets[1].send(m.encode(m.Stop()))
        thread.join()
        context.destroy(linger=0)
        os.close(beats)
        os.close(heart)


@pytest.fixture
def assembly(smollm2_path: Path) -> Iterator[Assembly]:
    config = EngineConfig(backend="cpu", max_context=512, kv=KVConfig(memory_bytes=100 * 10**6))
    built = build("smollm2", config)
    assert built.grammars is not None
    built.grammars.prepare()
    yield built
    built.engine.close()


def test_streams_go_on_while_anothers_grammar_is_compiled(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    grammars = assembly.grammars
    assert grammars is not None
    real_check = grammars.check

    def slow_check(spec: GrammarSpec) -> object:
        if not grammars.is_compiled(spec):
            begun.set()
            assert go_on.wait(LIMIT_S)
        return real_check(spec)

    monkeypatch.setattr(grammars, "check", slow_check)
    with running_loop(assembly) as api:
        api.send(m.Add(Request("plain", (1, 2, 3), PLAIN)))
        api.wait_for("plain", 1)
        for name in ("held", "left"):
            api.send(m.Add(Request(name, (1, 2, 3), DIGIT)))
        assert begun.wait(LIMIT_S)
        seen = len(api.outputs("plain"))
        api.wait_for("plain", seen + 20)  # the compiler has not moved
        assert not api.outputs("held")
        api.send(m.Abort(("left",)))
        api.wait_for("plain", seen + 40)
        go_on.set()
        api.wait_for("held", 2)
        assert "".join(output.text for output in api.outputs("held")).isdigit()
        api.send(m.Abort(("plain",)))
        while assembly.engine.busy:
            api.listen(0.1)
        assert not api.outputs("left")


def test_a_grammar_that_cannot_be_followed_is_refused_after_all(assembly: Assembly) -> None:
    """An API process that checks has refused it before; this one is told by the engine."""
    with running_loop(assembly) as api:
        api.send(m.Add(Request("bad", (1, 2, 3), SamplingParams(grammar=GrammarSpec("regex", "(a")))))
        while not any(isinstance(message, m.Refused) for message in api.heard):
            api.listen()
        refused = next(message for message in api.heard if isinstance(message, m.Refused))
        assert refused.request_id == "bad" and refused.is_bad_request and "unclosed" in refused.message


def told_order(api: Api, request_id: str) -> list[str]:
    """Of a request: what of its arrival and its end was sent, in order."""
    order = []
    for message in api.heard:
        if isinstance(message, m.Seen):
            order += ["arrived" for one in message.events if isinstance(one, w.Arrived) and one.id == request_id]
        elif isinstance(message, m.StepOutputs):
            order += ["ended" for one in message.outputs if one.request_id == request_id and one.finish_reason]
    return order


def test_a_viewer_hears_of_an_arrival_before_the_end_even_when_both_are_of_one_turn(assembly: Assembly) -> None:
    one_token = replace(PLAIN, max_tokens=1)
    with running_loop(assembly) as api:
        api.send(m.Watch(True))
        for number in range(4):
            api.send(m.Add(Request(f"short-{number}", (5, 6, 7 + number), one_token)))
            api.wait_for(f"short-{number}", 1)
            assert told_order(api, f"short-{number}") == ["arrived", "ended"]
        api.send(m.Hold(True))  # so that both messages are there when the loop looks next
        api.send(m.Add(Request("left", (5, 6, 7), PLAIN)))
        api.send(m.Abort(("left",)))
        assert api.wait_for("left", 1)[0].finish_reason is FinishReason.ABORT
        assert told_order(api, "left") == ["arrived", "ended"]


def test_what_is_known_already_waits_for_no_step(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a first token is that came with its request, or that a request is over."""
    engine, go_on, num_stepped = assembly.engine, threading.Event(), 0
    add, step = engine.add, engine.step

    def add_and_end(request: Request) -> str:
        add(request)
        engine.abort(request.request_id)
        return request.request_id

    def step_late() -> list[Event]:
        nonlocal num_stepped
        go_on.wait(5.0)
        num_stepped += 1
        return step()

    monkeypatch.setattr(engine, "add", add_and_end)
    monkeypatch.setattr(engine, "step", step_late)
    with running_loop(assembly) as api:
        api.send(m.Add(Request("over", (5, 6, 7), PLAIN)))
        api.wait_for("over", 1)
        assert num_stepped == 0
        go_on.set()


@pytest.mark.parametrize("broken", ["__init__", "added", "launched", "came_back", "take"])
def test_a_fault_of_the_watch_ends_no_request(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the watch")

    monkeypatch.setattr(StepWatch, broken, fail)
    with running_loop(assembly) as api:
        api.send(m.Watch(True))
        api.send(m.Add(Request("one", (5, 6, 7), replace(PLAIN, max_tokens=3))))
        end_s = time.monotonic() + LIMIT_S
        while not (outputs := api.outputs("one")) or outputs[-1].finish_reason is None:
            assert time.monotonic() < end_s and not any(isinstance(one, m.Refused) for one in api.heard)
            api.listen()
        assert outputs[-1].finish_reason is FinishReason.LENGTH
