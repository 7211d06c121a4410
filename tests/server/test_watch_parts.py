"""The parts of watching, each without a server: the ring, a viewer on a connection that fills up, the greeting, and an
engine's steps as they are noted."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.config import EngineConfig
from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.server import messages as m
from twostroke.server import watch_events as w
from twostroke.server import watch_hub
from twostroke.server import watch_wording as wording
from twostroke.server.client import EngineClient
from twostroke.server.connections import SINK_SCOPE
from twostroke.server.mailroom import MAX_LEFT, Mailroom
from twostroke.server.metrics import Metrics
from twostroke.server.viewer import Viewer, ViewerStream
from twostroke.server.watch_history import PIECE_BYTES, History
from twostroke.server.watch_hub import WatchHub


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# The ring


def test_the_ring_is_bounded_in_bytes_and_in_age_and_its_numbers_run_on() -> None:
    clock = Clock()
    history = History(max_bytes=1000, max_age_s=10.0, clock=clock)
    for number in range(300):
        assert history.end == number
        history.add(b"%03d" % number * 10)
        assert history.num_bytes <= 1000 and history.num_bytes == 30 * (history.end - history.first)
    clock.now_s += 10.5
    history.add(b"late")
    assert (history.end - history.first, history.num_bytes) == (1, 4)
    history.clear()
    assert (history.first, history.end, history.num_bytes, history.piece(0)) == (301, 301, 0, (b"", 301))


def test_pieces_of_the_ring_make_up_the_whole_from_any_number_on() -> None:
    draw, history, events = random.Random(3), History(max_bytes=1 << 30), []
    for number in range(400):
        events.append(b"%d:" % number + b"x" * draw.randrange(3000))
        history.add(events[-1])
    for start in (0, 17, 399, 400):
        place, read = start, b""
        while piece := history.piece(place)[0]:
            assert len(piece) < PIECE_BYTES + 3100
            place, read = history.piece(place)[1], read + piece
        assert read == b"".join(events[start:]) and place == 400


def test_maps_have_a_budget_of_their_own_and_drive_out_no_step() -> None:
    history, steps = History(max_bytes=4000), []
    for number in range(100):
        steps.append(b"s%03d" % number)
        history.add(steps[-1])
        history.add(b"m%03d" % number * 75, is_map=True)
        assert history.num_map_bytes <= 1000 and history.num_bytes <= 4000
    assert history.first == 0 and history.end == 200
    read = history.piece(0)[0]
    assert [read[read.index(step) :][:4] for step in steps] == steps, "every step is there"
    assert read.endswith(b"m097" * 75 + b"s098" + b"m098" * 75 + b"s099" + b"m099" * 75)
    assert len(read) == history.num_bytes == 400 + 900
    history.add(b"M" * 1001, is_map=True)
    history.add(b"E" * 4001)
    assert history.piece(0) == (read, 202), "what is too large is not kept, and nothing goes for it"
    history.clear()
    assert (history.num_bytes, history.num_map_bytes, history.end) == (0, 0, 202)


# A viewer


class Sink:
    """A connection that takes `room` bytes, and more once it is emptied."""

    def __init__(self, room: int) -> None:
        self.room, self.written, self.kept = room, b"", 0
        self.most_kept = 0
        self._emptied = asyncio.Event()

    def write(self, events: bytes) -> None:
        assert events
        self.written += events
        self.kept += len(events)
        self.most_kept = max(self.most_kept, self.kept)

    @property
    def is_full(self) -> bool:
        return self.kept > self.room

    def empty(self) -> None:
        self.kept = 0
        self._emptied.set()

    async def drain(self) -> None:
        self._emptied.clear()
        if self.is_full:
            await self._emptied.wait()

    async def cut_off(self) -> None:
        self.room = -1


class StillHub:
    """Has a history, and nothing that waits to be sent."""

    def __init__(self, history: History) -> None:
        self.history = history

    def flush(self) -> None:
        return

    def last_words(self) -> bytes:
        return b""


def feed_and_publish(room: int, reads: bool, number: int = 3000) -> tuple[Sink, History]:
    """A viewer while events are published, which reads now and then, or never."""

    async def run() -> tuple[Sink, History]:
        history = History(max_bytes=50_000)
        hub = StillHub(history)
        viewer, sink = Viewer(hub), Sink(room)
        viewer.greet(b"hello;", 0)
        feeding = asyncio.create_task(viewer.feed(sink, 60.0 if reads else 0.2))  # type: ignore[arg-type]
        for index in range(number):
            event = b"%d;" % index + b"." * 50
            history.add(event)
            viewer.offer(event, history.end)
            if index % 10 == 0:
                await asyncio.sleep(0)
            if reads and index % 1400 == 1399:
                sink.empty()
                await asyncio.sleep(0)
        for _ in range(40 if reads else 0):
            sink.empty()
            await asyncio.sleep(0)
        if not reads:
            with pytest.raises(TimeoutError):
                await feeding
        viewer.close()
        await asyncio.sleep(0)
        feeding.cancel()
        return sink, history

    return asyncio.run(run())


def test_a_viewer_that_keeps_up_is_sent_every_event_once_and_in_order() -> None:
    sink, _ = feed_and_publish(room=1 << 30, reads=True)
    numbers = [int(part.rpartition(b".")[2]) for part in sink.written.removeprefix(b"hello;").split(b";")[:-1]]
    assert sink.written.startswith(b"hello;") and numbers == list(range(3000))


def test_a_slow_viewer_misses_some_is_told_how_many_and_is_never_queued_for() -> None:
    sink, history = feed_and_publish(room=20_000, reads=True)
    skipped = [json.loads(part.split(b"\n\n")[0])["count"] for part in sink.written.split(b"data: ")[1:]]
    seen = sink.written.count(b";") - 1
    assert skipped and sum(skipped) + seen == 3000
    assert sink.most_kept < 20_000 + PIECE_BYTES + 1000 and history.num_bytes <= 50_000


def test_a_viewer_that_never_reads_is_given_up() -> None:
    sink, _ = feed_and_publish(room=20_000, reads=False)
    assert sink.most_kept < 20_000 + PIECE_BYTES + 1000


def test_two_hundred_streams_leave_no_task_behind() -> None:
    async def run() -> None:
        history, ended = History(), []
        history.add(b"an event")
        hub = StillHub(history)
        before = len(asyncio.all_tasks())
        for _ in range(200):
            gone = asyncio.Event()

            async def receive(gone: asyncio.Event = gone) -> dict[str, Any]:
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                await asyncio.sleep(0)

            viewer, sink = Viewer(hub), Sink(1 << 20)
            viewer.greet(b"hello;", 0)
            stream = ViewerStream(viewer, lambda: ended.append(1), 60.0)
            serving = asyncio.create_task(stream({SINK_SCOPE: sink}, receive, send))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gone.set()
            await serving
            assert sink.written == b"hello;an event"
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == before and len(ended) == 200

    asyncio.run(run())


# No event has room for a text


def test_no_event_has_a_field_for_texts_or_tokens() -> None:
    """A new field of text has to be looked at here."""
    texts = {
        (kind.__name__, name)
        for kind in (w.Arrived, w.Admitted, w.Stepped, w.KVMap, w.Ended, w.Control, w.Skipped, w.State, w.Break)
        for name, of in kind.__annotations__.items()
        if "str" in str(of)
    }
    assert texts == {
        *(("Arrived", name) for name in ("id", "level")),
        ("Admitted", "tiers"),
        ("Break", "kind"),
        *(("Ended", name) for name in ("reason", "level", "verdict", "cause")),
        ("State", "state"),
        *(("Control", name) for name in ("viewer_prefix", "reason")),
    }


# Names


def test_a_request_that_was_given_up_keeps_its_name_until_the_engine_has_told_of_it() -> None:
    mail = Mailroom(Metrics(), None)
    inbox = mail.open(2, 1, lambda _: None)
    inbox.name = "given-up"
    mail.expect(inbox)
    ids = inbox.unfinished
    assert mail.forget(inbox) == ids and mail.names() == set()
    assert [mail.name_of(one) for one in ids] == ["given-up", "given-up"] and mail.name_of("nobody") == ""
    for _ in range(MAX_LEFT):
        other = mail.open(1, 1, lambda _: None)
        mail.expect(other)
        mail.forget(other)
    assert mail.name_of(ids[0]) == "" and len(mail._left) == MAX_LEFT


# A fault of the page's own


class BrokenHub:
    is_on = True

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def test_a_fault_in_the_hub_is_the_pages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    client = EngineClient(m.EngineSettings("small", EngineConfig()), Metrics())
    client.hub = BrokenHub()  # type: ignore[assignment]
    mail, inbox = client._mail, client._mail.open(1, 1, lambda _: None)
    mail.expect(inbox)
    [request_id] = inbox.unfinished
    for _ in range(10):
        client._hear(m.Seen([]))
    client._hear(m.StepOutputs([], [TokenEvent(request_id, 0, (7,), "a", finish_reason=FinishReason.LENGTH)]))
    assert inbox.unfinished == [], "the answer has come"
    assert 1 <= capsys.readouterr().err.count("live page") <= 5


# Steps with very many streams


def test_every_step_with_both_phases_has_its_split_however_many_streams_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pointed: list[int] = []
    monkeypatch.setattr(wording, "with_intensity", lambda event, *_: pointed.append(event.id) or event)

    async def run() -> None:
        metrics = Metrics()
        client = EngineClient(m.EngineSettings("small", EngineConfig()), metrics)
        hub = WatchHub("small", "full", metrics, client)
        slots = [(r, 9, 0, 0) for r in range(64)]
        for number in range(8):  # a millisecond apart
            chunks = [(99, 0, 5, 50)] if number % 2 else []
            done_s = 100.0 + number / 1000
            step = w.Stepped(number, done_s - 0.001, done_s, 0.001, 0.0, None, chunks, slots, [], 0, 64)
            hub._step(step, None)  # type: ignore[arg-type]
        hub.flush()

    asyncio.run(run())
    assert pointed == [0, 1, 3, 5, 7]


def test_an_end_is_told_after_the_step_that_brought_it_and_one_without_a_step_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine may put any time between the two messages."""
    monkeypatch.setattr(watch_hub, "STEP_WAIT_S", 600.0)
    monkeypatch.setattr(wording, "with_intensity", lambda event, *_: event)
    monkeypatch.setattr(wording, "ended", lambda r, *_: w.Skipped(r))  # in its place

    async def run() -> None:
        metrics = Metrics()
        client = EngineClient(m.EngineSettings("small", EngineConfig()), metrics)
        client.facts = SimpleNamespace(engine=None)  # type: ignore[assignment]
        hub = WatchHub("small", "full", metrics, client)
        hub.is_on = True

        def told() -> list[str]:
            for _ in range(8):
                hub.flush()
            lines, _ = hub.history.piece(0)
            return [json.loads(line[6:])["t"] for line in lines.split(b"\n\n")[:-1]]

        hub.seen([w.Arrived(r, f"{r}", 1.0, 4, 1, "default", 0) for r in range(40)])
        hub.ended([TokenEvent(f"{r}", 0, (), "", finish_reason=FinishReason.STOP) for r in range(39)])
        assert told() == ["arrived"] * 40
        hub.seen([w.Stepped(1, 1.0, 2.0, 1.0, 0.0, None, [], [(r, 9, 0, 0) for r in range(39)], [], 0, 40)])
        assert told()[40:] == ["step"] + ["skipped"] * 39
        hub.ended([TokenEvent("39", 0, (), "", finish_reason=FinishReason.ABORT)])
        assert len(told()) == 80
        monkeypatch.setattr(watch_hub, "STEP_WAIT_S", 0.0)
        assert told()[80:] == ["skipped"]

    asyncio.run(run())


def test_an_admission_that_comes_with_the_last_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine admits a request, and has its only token, in one turn."""
    monkeypatch.setattr(watch_hub, "STEP_WAIT_S", 600.0)
    monkeypatch.setattr(wording, "ended", lambda r, *_: w.Skipped(r))  # in its place

    async def run() -> None:
        metrics = Metrics()
        client = EngineClient(m.EngineSettings("small", EngineConfig()), metrics)
        client.facts = SimpleNamespace(engine=None)  # type: ignore[assignment]
        hub = WatchHub("small", "full", metrics, client)
        hub.is_on = True
        hub.seen([w.Arrived(7, "a", 1.0, 4, 1, "default", 0)])
        hub.ended([TokenEvent("a", 0, (), "", finish_reason=FinishReason.LENGTH)])
        hub.seen([w.Admitted(7, 1.5, 0, {}, None)])
        lines, _ = hub.history.piece(0)
        assert [json.loads(line[6:])["t"] for line in lines.split(b"\n\n")[:-1]] == ["arrived", "admitted", "skipped"]
        assert not hub._by_r and not hub._live
        hub.close()

    asyncio.run(run())


def test_the_engine_is_told_to_stop_telling_once_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(watch_hub, "LINGER_S", 0.02)
    monkeypatch.setattr(EngineClient, "tell", lambda _, message: told.append(message))

    async def run() -> None:
        metrics = Metrics()
        hub = WatchHub("small", "full", metrics, EngineClient(m.EngineSettings("small", EngineConfig()), metrics))
        viewer = Viewer(hub)
        hub.viewers[viewer.token] = viewer
        hub._begin()
        hub.publish(w.Skipped(1))
        assert told == [m.Watch(True)] and hub.history.num_bytes
        hub.leave(viewer)
        assert told == [m.Watch(True)], "a page that is loaded again has its history"
        await asyncio.sleep(0.1)
        assert told == [m.Watch(True), m.Watch(False)] and not hub.is_on and not hub.history.num_bytes

    asyncio.run(run())
