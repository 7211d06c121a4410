"""A viewer of `/watch`, as a page is one: it reads on a thread, and can be asked what it has seen."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

Event = dict[str, Any]
LIMIT_S = 60.0


class WatchReader:
    def __init__(self, address: str, **headers: str) -> None:
        self._client = httpx.Client(timeout=LIMIT_S)
        self._address, self._headers = address, headers
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.raw = b""
        self.events: list[Event] = []
        self.is_over = False

    def __enter__(self) -> WatchReader:
        self._thread.start()
        self.wait(lambda seen: bool(seen))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()

    def leave(self) -> None:
        stream = self._response.extensions["network_stream"]
        with contextlib.suppress(OSError):
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # which ends a read that waits
        self._thread.join(LIMIT_S)
        self._client.close()

    def _read(self) -> None:
        try:
            with self._client.stream("GET", f"{self._address}/watch", headers=self._headers) as self._response:
                assert self._response.status_code == 200
                for data in self._response.iter_raw():
                    self._take(data)
        except (httpx.HTTPError, httpx.StreamError, OSError, AttributeError, ValueError):
            pass  # it was closed while it was read
        with self._news:
            self.is_over = True
            self._news.notify_all()

    def _take(self, data: bytes) -> None:
        with self._news:
            read = self.raw.count(b"\n\n")
            self.raw += data
            whole = self.raw.split(b"\n\n")[read:-1]
            self.events += [json.loads(one.removeprefix(b"data: ")) for one in whole if one.startswith(b"data: ")]
            self._news.notify_all()

    def wait(self, is_so: Callable[[list[Event]], bool], limit_s: float = LIMIT_S) -> list[Event]:
        """Until what was seen is so; all of it."""
        end_s = time.monotonic() + limit_s
        with self._news:
            while not is_so(self.events):
                assert not self.is_over, "the stream ended"
                left_s = end_s - time.monotonic()
                assert left_s > 0, f"not seen within {limit_s} s; the last: {self.events[-3:]}"
                self._news.wait(left_s)
            return list(self.events)

    @property
    def hello(self) -> Event:
        return self.of("hello")[-1]

    def of(self, kind: str, **fields: object) -> list[Event]:
        """Seen so far, with these values."""
        return [one for one in list(self.events) if one["t"] == kind and fields.items() <= one.items()]

    def ended(self, name: str, samples: int = 1) -> list[Event]:
        """Waits until all samples of the request with this id have ended; their last events."""

        def found(seen: list[Event]) -> list[Event]:
            rs = {one["r"] for one in seen if one["t"] == "arrived" and one["id"] == name}
            return [one for one in seen if one["t"] == "ended" and one["r"] in rs]

        return found(self.wait(lambda seen: len(found(seen)) == samples))


def tokens_of(events: list[Event], r: int) -> int:
    """As many as its steps say that it was brought."""
    steps = [one for one in events if one["t"] == "step"]
    first = sum(chunk[1] + chunk[2] == chunk[3] for step in steps for chunk in step["chunks"] if chunk[0] == r)
    return first + sum(1 + slot[3] for step in steps for slot in step["slots"] if slot[0] == r)
