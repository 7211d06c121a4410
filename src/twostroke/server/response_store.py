"""Finished responses, kept for those who go on from them or ask for them again: in memory alone, bounded in number and
bytes, each API key with its own. A turn is kept once, however many responses go on from it. Knows no HTTP."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OVERHEAD_BYTES = 1024
"""Of a response or a turn, beside its text: so that a bound on bytes is one on memory, too."""

_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
encode_items = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one response was asked and what it answered, as lists of items in JSON: as objects they would take several
    times the room."""

    asked: bytes
    answered: bytes
    item_ids: tuple[str, ...]

    @staticmethod
    def of(asked: Sequence[dict[str, Any]], answered: Sequence[dict[str, Any]]) -> Turn:
        ids = tuple(item["id"] for item in (*asked, *answered) if isinstance(item.get("id"), str))
        return Turn(encode_items(asked), encode_items(answered), ids)

    @property
    def num_bytes(self) -> int:
        return len(self.asked) + len(self.answered) + sum(map(len, self.item_ids)) + OVERHEAD_BYTES

    def items(self) -> list[dict[str, Any]]:
        return _decode_items(self.asked) + _decode_items(self.answered)


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    id: str
    reply: bytes
    """As it was sent, in JSON."""
    turns: tuple[Turn, ...]
    """The whole conversation, the response's own turn last."""

    @property
    def num_bytes(self) -> int:
        return len(self.reply) + 8 * len(self.turns) + OVERHEAD_BYTES

    def conversation(self) -> list[dict[str, Any]]:
        """Every item, asked or answered, that a response which goes on from this one follows."""
        return [item for turn in self.turns for item in turn.items()]

    def input_items(self) -> list[dict[str, Any]]:
        """What this response itself was made from."""
        earlier = [item for turn in self.turns[:-1] for item in turn.items()]
        return earlier + _decode_items(self.turns[-1].asked)


class _Shelf:
    """One key's."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0
        self._num_uses: dict[Turn, int] = {}
        self._turn_of_item: dict[str, Turn] = {}

    def put(self, response: StoredResponse) -> None:
        self.responses[response.id] = response
        self.num_bytes += response.num_bytes
        for turn in response.turns:
            if turn not in self._num_uses:
                self.num_bytes += turn.num_bytes
                self._turn_of_item.update(dict.fromkeys(turn.item_ids, turn))
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
                for item_id in turn.item_ids:
                    if self._turn_of_item.get(item_id) is turn:
                        del self._turn_of_item[item_id]
        return True

    def item(self, item_id: str) -> dict[str, Any] | None:
        turn = self._turn_of_item.get(item_id)
        items = [] if turn is None else turn.items()
        return next((item for item in items if item.get("id") == item_id), None)


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
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
        self._shelves.setdefault(key, _Shelf()).put(response)
        while len(self) > self._max_responses:
            self._forget_one(max(self._shelves.values(), key=lambda shelf: len(shelf.responses)))
        while self.num_bytes > self._max_bytes:
            self._forget_one(max(self._shelves.values(), key=lambda shelf: shelf.num_bytes))

    def find(self, key: int, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(key)
        if shelf is None or response_id not in shelf.responses:
            return None
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def find_item(self, key: int, item_id: str) -> dict[str, Any] | None:
        """One that a kept response was asked or has answered."""
        shelf = self._shelves.get(key)
        return None if shelf is None else shelf.item(item_id)

    def delete(self, key: int, response_id: str) -> bool:
        """Whether there was one. What goes on from it keeps its turn."""
        shelf = self._shelves.get(key)
        return shelf is not None and shelf.remove(response_id)

    def _forget_one(self, shelf: _Shelf) -> None:
        shelf.remove(next(iter(shelf.responses)))
