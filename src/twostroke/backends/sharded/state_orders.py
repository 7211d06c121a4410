"""What rank 0 does with the states of recurrent layers around a pass, done by every rank to its own part of them: rank
0 alone knows which drafts of a slot hold, and which states are kept. The others are told in front of the next batch, in
the same order, since nobody reads a state in between."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from twostroke.backends.host.states import HostStates

Order = tuple[int, int, int, int, int]
"""Its kind, its group, and three numbers."""
_ORDER_NUMBERS, _NUMBER_BYTES = 5, 4


class _Kind(IntEnum):
    COPY = 0
    SAVE = 1
    COMMIT = 2
    DROP_ASIDE = 3


class OrderedStates:
    """Rank 0's: changes its own at once, and notes what the others are to do."""

    def __init__(self, own: HostStates) -> None:
        self._own = own
        self._orders: list[Order] = []

    def copy(self, group: int, source: int, target: int) -> None:
        self._own.copy(group, source, target)
        self._orders.append((_Kind.COPY, group, source, target, 0))

    def save(self, group: int, slot: int, num_drafts: int, target: int) -> None:
        self._own.save(group, slot, num_drafts, target)
        self._orders.append((_Kind.SAVE, group, slot, num_drafts, target))

    def commit(self, group: int, slot: int, num_drafts: int) -> None:
        self._own.commit(group, slot, num_drafts)
        self._orders.append((_Kind.COMMIT, group, slot, num_drafts, 0))

    def drop_aside(self) -> None:
        self._own.drop_aside()
        self._orders.append((_Kind.DROP_ASIDE, 0, 0, 0, 0))

    def take_orders(self) -> list[Order]:
        """All since the last time."""
        orders, self._orders = self._orders, []
        return orders


def with_orders(orders: list[Order], batch: bytes) -> bytes:
    """A batch with orders in front: how many, then their numbers."""
    numbers = [len(orders), *(number for order in orders for number in order)]
    return np.array(numbers, dtype=np.int32).tobytes() + batch


def carry_out(message: bytearray, states: HostStates | None) -> memoryview:
    """Do what a message has in front; gives the batch behind it."""
    count = int(np.frombuffer(message, dtype=np.int32, count=1)[0])
    total = count * _ORDER_NUMBERS
    orders = np.frombuffer(message, dtype=np.int32, count=total, offset=_NUMBER_BYTES)
    for order in orders.reshape(count, _ORDER_NUMBERS).tolist():
        assert states is not None
        _do(order, states)
    return memoryview(message)[_NUMBER_BYTES * (1 + total) :]


def _do(order: list[int], states: HostStates) -> None:
    kind, group, *numbers = order
    match kind:
        case _Kind.COPY:
            states.copy(group, numbers[0], numbers[1])
        case _Kind.SAVE:
            states.save(group, *numbers)
        case _Kind.COMMIT:
            states.commit(group, numbers[0], numbers[1])
        case _:
            states.drop_aside()
