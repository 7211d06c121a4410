"""Finished responses, kept for those who go on from them or ask for them again: in memory alone, bounded in number and
bytes, each API key with its own. A turn is kept once, however many responses go on from it. Knows no HTTP."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

OVERHEAD_BYTES = 256
"""Of a response, a turn or an item, beside its text: so that a bound on bytes is one on memory, too."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class StoredItem(NamedTuple):
    """In JSON: as objects it would take several times the room."""

    id: str
    text: bytes

    @staticmethod
    def of(item: dict[str, Any]) -> StoredItem:
        return StoredItem(item["id"], _encode(item))

    def read(self) -> dict[str, Any]:
        return _decode(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one response was asked and what it answered."""

    asked: tuple[StoredItem, ...]
    answered: tuple[StoredItem, ...]

    @staticmethod
    def of(asked: Iterable[dict[str, Any]], answered: Iterable[dict[str, Any]]) -> Turn:
        return Turn(tuple(map(StoredItem.of, asked)), tuple(map(StoredItem.of, answered)))

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return self.asked + self.answered

    @property
    def num_bytes(self) -> int:
        return sum(len(item.id) + len(item.text) + OVERHEAD_BYTES for item in self.items) + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    id: str
    reply: bytes
    """As it was sent, in JSON."""
    turns: tuple[Turn, ...]
    """The whole conversation, the response's own turn last."""

    @property
    def num_bytes(self) -> int:
        """What it takes beside its turns."""
        return len(self.reply) + 8 * len(self.turns) + OVERHEAD_BYTES

    def conversation(self) -> list[StoredItem]:
        """Every item, asked or answered, that a response which goes on from this one follows."""
        return [item for turn in self.turns for item in turn.items]

    def input_items(self) -> list[StoredItem]:
        """What this response itself was made from."""
        return [*(item for turn in self.turns[:-1] for item in turn.items), *self.turns[-1].asked]


class _Shelf:
    """The responses of one key."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0
        self._num_uses: dict[Turn, int] = {}
        self._items: dict[str, tuple[Turn, StoredItem]] = {}

    def put(self, response: StoredResponse) -> None:
        self.responses[response.id] = response
        self.num_bytes += response.num_bytes
        for turn in response.turns:
            if turn not in self._num_uses:
                self.num_bytes += turn.num_bytes
                self._items.update({item.id: (turn, item) for item in turn.items})
            self._num_uses[turn] = self._num_uses.get(turn, 0) + 1

    def remove(self, response_id: str) -> bool:
        response = self.responses.pop(response_id, None)
        if response is None:
            return False
        self.num_bytes -= response.num_bytes
        for turn in response.turns:
            self._num_uses[turn] -= 1
            if not self._num_uses[turn]:
                del self._num_uses[turn]
                self.num_bytes -= turn.num_bytes
                for item in turn.items:
                    if item.id in self._items and self._items[item.id][0] is turn:
                        del self._items[item.id]
        return True

    def item(self, item_id: str) -> StoredItem | None:
        found = self._items.get(item_id)
        return None if found is None else found[1]


class ResponseStore:
    """May be used from several threads: long answers are worded beside the event loop."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[int, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def keep(self, key: int, response: StoredResponse) -> None:
        """The longest unused of whoever has the most make room: nobody can push out another's by keeping many."""
        if response.num_bytes + sum(turn.num_bytes for turn in response.turns) > self._max_bytes:
            return  # all others of its key would go, and it after them
        with self._lock:
            self._shelves.setdefault(key, _Shelf()).put(response)
            while len(self) > self._max_responses:
                self._forget_one(max(self._shelves.values(), key=lambda shelf: len(shelf.responses)))
            while self.num_bytes > self._max_bytes:
                self._forget_one(max(self._shelves.values(), key=lambda shelf: shelf.num_bytes))

    def find(self, key: int, response_id: str) -> StoredResponse | None:
        with self._lock:
            shelf = self._shelves.get(key)
            if shelf is None or response_id not in shelf.responses:
                return None
            shelf.responses.move_to_end(response_id)
            return shelf.responses[response_id]

    def find_item(self, key: int, item_id: str) -> StoredItem | None:
        """One that a kept response was asked or has answered."""
        with self._lock:
            shelf = self._shelves.get(key)
            return None if shelf is None else shelf.item(item_id)

    def delete(self, key: int, response_id: str) -> bool:
        """Whether there was one. What goes on from it keeps its turn."""
        with self._lock:
            shelf = self._shelves.get(key)
            return shelf is not None and shelf.remove(response_id)

    def _forget_one(self, shelf: _Shelf) -> None:
        shelf.remove(next(iter(shelf.responses)))
