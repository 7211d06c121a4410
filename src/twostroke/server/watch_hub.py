"""Who watches, and what they are told. The engine tells its steps while somebody watches, and for a while after, so
that a page that is loaded again has its history. Each event is worded once, however many read it; one who reads too
slowly misses some, and one who does not read at all is cut off. Knows viewers and events; knows no routes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from twostroke.core.events import TokenEvent
from twostroke.cost.step_cost import StepCost
from twostroke.explain.facts import EngineFacts
from twostroke.server import messages as m
from twostroke.server import watch_events as w
from twostroke.server import watch_wording as wording
from twostroke.server.errors import ApiError
from twostroke.server.holding import Holding
from twostroke.server.metrics import Metrics
from twostroke.server.recorder import recorded_hello
from twostroke.server.viewer import Viewer
from twostroke.server.watch_history import History

LINGER_S = 20.0
"""How long the engine goes on telling its steps once nobody watches."""
FLUSH_S = 0.05
"""Events go out together, this often at most: a page draws no faster, and each write wakes a process."""
KEPT_MAPS_S = 1.0
"""In the history there is a map of KV blocks this often at most."""
SMALL_STEP, POINTS_EVERY_S = 32, 0.01
"""Of steps with more streams and one phase, so often at most is it worked out where they lie on the roofline: it takes
a microsecond or two a stream, on the loop that writes answers. One with both phases always has its points and its split
in seconds, as a page draws it by them: its chunk makes it long, so there are not many of them."""
STEP_WAIT_S = 1.0
"""How long an end waits for the step that brought it, which comes a moment later. None brings one that was aborted."""
ENDINGS_AT_ONCE = 16
"""An explanation takes a fraction of a millisecond, on the loop that writes answers."""
MAX_VIEWERS = 64


class WatchedEngine(Protocol):
    """What the engine's client does for whoever watches."""

    @property
    def facts(self) -> m.Ready | None: ...

    @property
    def health(self) -> str: ...

    def tell(self, message: m.Watch | m.Hold | m.Grant) -> None:
        """To the engine, where there is one."""

    def name_of(self, request_id: str) -> str:
        """What the client calls a request: the answer's x-request-id."""

    def names_in_flight(self) -> set[str]: ...


class Recorder(Protocol):
    """Takes events as JSON, for good."""

    def keep(self, event: bytes) -> None: ...


@dataclass(slots=True)
class _Live:
    """A sample that has not ended, with what was told of it and under which number."""

    r: int
    told: list[tuple[int, bytes]]


class WatchHub:
    def __init__(self, model: str, page: w.PageMode, metrics: Metrics, engine: WatchedEngine) -> None:
        self._model = model
        self._page = page
        self._metrics = metrics
        self._engine = engine
        self.history = History()
        self.viewers: dict[str, Viewer] = {}
        """By their secret tokens."""
        self.is_on = False
        self._recorder: Recorder | None = None
        self._live: dict[tuple[str, int], _Live] = {}
        self._by_r: dict[int, _Live] = {}
        self._endings: deque[tuple[float, int, TokenEvent]] = deque()
        """Samples that have ended, since when, and are yet to be explained."""
        self._batch: list[bytes] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._last_map: bytes | None = None
        """Where it is newer than the history's."""
        self._kept_map_s = -KEPT_MAPS_S
        self._pointed_s = self._seen_s = self._flushed_s = 0.0
        self._cost: tuple[m.Stats | None, StepCost | None] = None, None
        self._is_closed = False
        self._told_state = ""
        self.holding = Holding(self, engine)

    # Viewers

    def join(self) -> Viewer:
        if self._is_closed:
            raise ApiError(503, "the server is stopping", code="server_stopping")
        if len(self.viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} pages watch this server already, and no more are let in"
            raise ApiError(503, message, code="too_many_viewers", headers={"Retry-After": "5"})
        if self._engine.facts is None:
            raise ApiError(503, "the engine is still starting", code="engine_unavailable", headers={"Retry-After": "1"})
        viewer = Viewer(self)
        self.viewers[viewer.token] = viewer
        self._metrics.viewers = len(self.viewers)
        self._begin()
        viewer.greet(self._greeting(viewer), self.history.first)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """May be called twice."""
        self.viewers.pop(viewer.token, None)
        self.holding.left(viewer)
        self._metrics.viewers = len(self.viewers)
        if self.is_on and not self.viewers and self._recorder is None and self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(LINGER_S, self._end)

    def record(self, recorder: Recorder) -> None:
        """From when the engine is ready, for as long as the server runs."""
        self._recorder = recorder

    def close(self) -> None:
        """Every viewer's stream ends."""
        self._is_closed = True
        self.holding.release("the server is stopping")
        self.flush()
        for viewer in self.viewers.values():
            viewer.close()

    def _begin(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if not self.is_on:
            self.is_on = True
            self._engine.tell(m.Watch(True))

    def _end(self) -> None:
        self._ending = None
        if not self.viewers and self._recorder is None:
            self.is_on = False
            self._engine.tell(m.Watch(False))
            self._forget()

    def _forget(self) -> None:
        self.history.clear()
        self._live.clear()
        self._by_r.clear()
        self._batch.clear()
        self._endings.clear()
        self._last_map = None

    # What a viewer is told first

    def hello(self) -> w.Hello:
        assert self._engine.facts is not None
        return wording.hello(self._engine.facts, self._model, self._engine.health, self._page)

    def _greeting(self, viewer: Viewer) -> bytes:
        own = replace(self.hello(), viewer=viewer.token, own_prefix=viewer.prefix)
        return framed(w.encode_json(own)) + b"".join(self._dropped_of_live())

    def _dropped_of_live(self) -> Iterator[bytes]:
        """Of requests that go on, what the history has no more."""
        for live in self._live.values():
            for number, payload in live.told:
                if number < self.history.first:
                    yield payload

    def last_words(self) -> bytes:
        """For whoever has read the history: how things stand that it does not keep."""
        state = framed(w.encode_json(w.State(self._engine.health)))
        return framed(w.encode_json(self.holding.told())) + state + (self._last_map or b"")

    # The engine

    def engine_ready(self) -> None:
        """It has started, perhaps once more: what was told of the one before is no longer so."""
        assert self._engine.facts is not None
        self._forget()
        self.holding.forget()
        self._told_state = self._engine.health
        if self._recorder is not None:
            self._recorder.keep(recorded_hello(self.hello(), self._engine.facts))
            self.is_on = True
        if self.is_on:
            self._engine.tell(m.Watch(True))
        for viewer in self.viewers.values():
            viewer.greet(self._greeting(viewer), self.history.first)

    def seen(self, events: Iterable[w.EngineEvent]) -> None:
        if not self.is_on or self._engine.facts is None:
            return  # it was told to stop, and has not heard it yet
        for event in events:
            if isinstance(event, w.Stepped):
                self._step(event, self._engine.facts.engine)
            elif isinstance(event, w.KVMap):
                self._map(event)
            elif isinstance(event, w.Arrived):
                live = _Live(event.r, [])
                self._live[event.id, event.sample] = self._by_r[event.r] = live
                live.told.append(self.publish(replace(event, id=self._engine.name_of(event.id))))
            elif (found := self._by_r.get(event.r)) is not None:
                found.told.append(self.publish(event))
        self._seen_s = _now_s()
        self._publish_endings()
        if self._seen_s - self._flushed_s >= FLUSH_S:
            self.flush()  # the engine has kept them together: they need not wait once more

    def ended(self, outputs: Iterable[TokenEvent]) -> None:
        """They are told after the step that brought them."""
        now_s = _now_s()
        for output in (one for one in outputs if one.finish_reason is not None):
            live = self._live.pop((output.request_id, output.sample_index), None)
            if live is None or self._engine.facts is None:
                continue
            self._endings.append((now_s, live.r, output))
        if self._endings:
            self._flush_later()

    def _publish_endings(self) -> None:
        """Some of those whose steps are told: each is explained, and hundreds may have ended at once."""
        facts, stats = self._engine.facts, self._metrics.engine
        until_s = math.inf if self._is_closed else max(self._seen_s, _now_s() - STEP_WAIT_S)
        for _ in range(min(ENDINGS_AT_ONCE, len(self._endings))):
            if self._endings[0][0] > until_s:
                return
            _, r, output = self._endings.popleft()
            self._by_r.pop(r, None)  # not before: its admission may have come with the step that ended it
            if facts is not None:
                self.publish(wording.ended(r, output, facts, stats, self._fitted_cost()))

    def _step(self, event: w.Stepped, facts: EngineFacts) -> None:
        """With its points on the roofline, unless it is one of very many with very many streams and nothing else."""
        if len(event.slots) <= SMALL_STEP or event.chunks or event.done_s - self._pointed_s >= POINTS_EVERY_S:
            self._pointed_s = event.done_s
            event = wording.with_intensity(event, facts, self._fitted_cost())
        self.publish(event)

    def _map(self, event: w.KVMap) -> None:
        is_kept = event.at_s - self._kept_map_s >= KEPT_MAPS_S
        if is_kept:
            self._kept_map_s = event.at_s
        payload = self.publish(event, is_kept=is_kept)[1]
        self._last_map = None if is_kept else payload

    def _fitted_cost(self) -> StepCost | None:
        stats = self._metrics.engine
        if stats is not self._cost[0] and self._engine.facts is not None:
            self._cost = stats, wording.fitted_cost(self._engine.facts, stats)
        return self._cost[1]

    # Out

    def publish(self, event: w.PageEvent, *, is_kept: bool = True) -> tuple[int, bytes]:
        """To all; its number in the history, and the event as it is sent."""
        worded = w.encode_json(event)
        payload, number = framed(worded), self.history.end
        if is_kept:
            self.history.add(payload, is_map=isinstance(event, w.KVMap))
            if self._recorder is not None:
                self._recorder.keep(worded)
        self._batch.append(payload)
        self._flush_later()
        return number, payload

    def _flush_later(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def _tell_state(self) -> None:
        """Where it has changed. It is looked at whenever something goes out, and by every viewer once a second."""
        if (state := self._engine.health) != self._told_state:
            self._told_state = state
            self.publish(w.State(state), is_kept=False)

    def flush(self) -> None:
        """To all who keep up: the others take it from the history."""
        self._tell_state()
        self._publish_endings()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._endings:
            self._flush_later()
        if not self._batch:
            return
        self._flushed_s = _now_s()
        together = b"".join(self._batch)
        self._batch.clear()
        for viewer in self.viewers.values():
            viewer.offer(together, self.history.end)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def framed(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"
