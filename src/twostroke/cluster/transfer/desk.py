"""The owner's side of a transport: answers one caller's messages in turn. It hands out bytes of slots that are on
offer, and takes notes about leases. Messages, by their `ask`:

- `note`: `alive` and `done`, lists of leases. Answered with an empty message. Leases that are not on offer are ignored.
- `read`: `lease`, `places` (pairs of group and slot), `sizes` (bytes of each). Answered with `bytes`, the sum, then
  with the bytes themselves, then with `whole`.

A message that is refused is answered with `error`, a sentence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from twostroke.cluster.transfer.channel import VIEWS_AT_ONCE, Channel, Message, RefusedError
from twostroke.cluster.transfer.interface import Place, is_id
from twostroke.cluster.transfer.news import News
from twostroke.cluster.transfer.offers import Offers, Reading

Answer = Callable[[Channel, Message], None]

NEXT_MESSAGE_S = 120.0
"""What a caller may be silent for between two asks."""
STALL_S = 20.0
"""What a caller may take for an answer, or for the next blocks of one."""


class Desk:
    def __init__(self, offers: Offers, news: News) -> None:
        self._offers, self._news = offers, news
        self.answers: dict[str, Answer] = {"note": self._take_notes, "read": self._send_blocks}
        """By what is asked. A transport adds what it can do beside these."""

    def serve(self, channel: Channel) -> None:
        """Until the caller leaves; raises TransferError then."""
        while True:
            message = channel.receive(time.monotonic() + NEXT_MESSAGE_S)
            ask = message.get("ask")
            answer = self.answers.get(ask) if isinstance(ask, str) else None
            try:
                if answer is None:
                    raise RefusedError("this engine's transport does not know what was asked")
                answer(channel, message)
            except RefusedError as problem:
                channel.send({"error": str(problem)}, time.monotonic() + STALL_S)

    def _take_notes(self, channel: Channel, message: Message) -> None:
        self._news.alive(self._offers.known(_ids(message, "alive")))
        self._news.done(self._offers.known(_ids(message, "done")))
        channel.send({}, time.monotonic() + STALL_S)

    def _send_blocks(self, channel: Channel, message: Message) -> None:
        with self.reading(channel, message) as reading:
            channel.send({"bytes": sum(view.nbytes for view in reading.views)}, time.monotonic() + STALL_S)
            for start in range(0, len(reading.views), VIEWS_AT_ONCE):
                channel.send_views(reading.views[start : start + VIEWS_AT_ONCE], time.monotonic() + STALL_S)
            self.end(channel, reading)

    @contextlib.contextmanager
    def reading(self, channel: Channel, message: Message, cut: Callable[[], None] | None = None) -> Iterator[Reading]:
        """One read as a caller asked for it. Raises RefusedError. `cut`: what the end of the offer does to it; it ends
        the connection unless said otherwise."""
        lease_id, sizes = message.get("lease"), message.get("sizes")
        if not is_id(lease_id) or not isinstance(sizes, list):
            raise RefusedError("a read names a lease, places and sizes")
        reading = self._offers.begin(str(lease_id), _places(message), sizes, cut or channel.cut)
        try:
            yield reading
        finally:
            self._offers.end(reading)

    def end(self, channel: Channel, reading: Reading) -> None:
        """Tell a caller whether it has the whole: the offer stood all the while."""
        channel.send({"whole": self._offers.end(reading)}, time.monotonic() + STALL_S)


def _ids(message: Message, name: str) -> list[str]:
    given = message.get(name)
    return [entry for entry in given if is_id(entry)] if isinstance(given, list) else []


def _places(message: Message) -> list[Place]:
    given = message.get("places")
    if not isinstance(given, list) or not all(_is_place(entry) for entry in given):
        raise RefusedError("places are pairs of a KV group and a slot")
    return [(group, slot) for group, slot in given]


def _is_place(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(type(part) is int for part in entry)
