"""An engine that stands still for a viewer who goes through it step by step. It harms nobody: it is held only while all
that runs is that viewer's own, and goes on by itself when anybody else's request comes or the viewer goes away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.server import messages as m
from twostroke.server import watch_events as w
from twostroke.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from twostroke.server.viewer import Viewer
    from twostroke.server.watch_hub import WatchedEngine, WatchHub


class Holding:
    def __init__(self, hub: WatchHub, engine: WatchedEngine) -> None:
        self._hub = hub
        self._engine = engine
        self._holder: Viewer | None = None

    @property
    def is_held(self) -> bool:
        return self._holder is not None

    def told(self, *, stepping: bool = False, reason: str = "") -> w.Control:
        prefix = "" if self._holder is None else self._holder.prefix
        return w.Control(self.is_held, stepping, prefix, reason)

    # What a viewer asks for

    def hold(self, token: str) -> None:
        viewer = self._viewer(token)
        if self._holder is not None and self._holder is not viewer:
            raise ApiError(409, "another page has paused the engine: it alone steps it", code="engine_held")
        others = sum(not name.startswith(viewer.prefix) for name in self._engine.names_in_flight())
        if others:
            what = "a request of another client runs" if others == 1 else f"{others} requests of other clients run"
            raise ApiError(409, f"{what}: the engine is paused only while nobody else waits for it", code="engine_busy")
        if self._holder is None:
            self._holder = viewer
            self._engine.tell(m.Hold(True))
            self._tell()

    def step(self, token: str, steps: int) -> None:
        viewer = self._viewer(token)
        if self._holder is not viewer:
            raise ApiError(409, "the engine is not paused by this page: pause it first", code="engine_not_held")
        self._engine.tell(m.Grant(steps))
        self._tell(stepping=True)

    def resume(self, token: str) -> None:
        """By any page that may control: it harms nobody."""
        self._viewer(token)
        self.release()

    def _viewer(self, token: str) -> Viewer:
        viewer = self._hub.viewers.get(token)
        if viewer is None:
            raise bad_request("viewer must be the one that the hello of an open /watch stream names", "viewer")
        return viewer

    # What else ends it

    def submitted(self, name: str) -> None:
        """A request came, or goes to the engine; it may be turned away yet."""
        if self._holder is not None and not name.startswith(self._holder.prefix):
            self.release("another client's request came, and the engine went on")

    def left(self, viewer: Viewer) -> None:
        if self._holder is viewer:
            self.release("the page that had paused the engine is gone, and the engine went on")

    def release(self, reason: str = "") -> None:
        if self._holder is not None:
            self._holder = None
            self._engine.tell(m.Hold(False))
            self._tell(reason=reason)

    def forget(self) -> None:
        """The engine that was held is gone."""
        self._holder = None

    def _tell(self, *, stepping: bool = False, reason: str = "") -> None:
        """Nobody needs it later: whoever joins is told how things stand."""
        self._hub.publish(self.told(stepping=stepping, reason=reason), is_kept=False)
        self._hub.flush()
