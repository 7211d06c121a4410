"""A file that `twostroke serve --record` wrote, event by event. It may end anywhere: what is whole is taken."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.web.shapes import finite, is_event

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    events: list[Event]
    """The first is a hello."""
    num_torn: int
    """Lines that were not whole, or no event that is known."""

    @property
    def hello(self) -> Event:
        return self.events[0]

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["t"] == kind]

    @property
    def seconds(self) -> float:
        """From the first moment that is told to the last."""
        times_s = [event[name] for event in self.events for name in ("at_s", "done_s") if name in event]
        return max(times_s) - min(times_s) if times_s else 0.0


def read_recording(path: Path) -> Recording:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadRequestError(f"cannot read the record {path}: {error.strerror or error}") from None
    found = [event for event in map(_event, lines) if event is not None]
    if not found or found[0]["t"] != "hello":
        raise BadRequestError(f"{path} is no record of a server's steps: `twostroke serve --record` writes them")
    return Recording(found, sum(bool(line) for line in lines) - len(found))


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    return event if is_event(event) else None
