"""What peers may read of this engine's slots: leases by id, and who reads each at the moment. A read that outlasts its
offer is never called whole, so an offer can end at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twostroke.cluster.transfer.channel import RefusedError
from twostroke.cluster.transfer.interface import Place, Slots


@dataclass(slots=True, eq=False)
class Offer:
    lease_id: str
    views: dict[Place, memoryview] = field(default_factory=dict)
    readings: set[Reading] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Reading:
    """One peer's read of an offer."""

    offer: Offer
    views: list[memoryview]
    cut: Callable[[], None]
    """Ends the peer's connection, from any thread."""


class Offers:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._offers: dict[str, Offer] = {}
        self._lock = threading.Lock()

    def add(self, lease_id: str, places: Sequence[Place]) -> None:
        views = {place: self._slots.view(*place).cast("B") for place in places}
        with self._lock:
            self._offers.setdefault(lease_id, Offer(lease_id)).views.update(views)

    def withdraw(self, lease_id: str) -> None:
        with self._lock:
            offer = self._offers.pop(lease_id, None)
            readings = [] if offer is None else list(offer.readings)
        for reading in readings:
            reading.cut()

    def known(self, lease_ids: Sequence[str]) -> list[str]:
        with self._lock:
            return [lease_id for lease_id in lease_ids if lease_id in self._offers]

    def is_read(self, lease_id: str) -> bool:
        """Whether a peer is reading it now."""
        with self._lock:
            offer = self._offers.get(lease_id)
            return offer is not None and bool(offer.readings)

    def begin(self, lease_id: str, places: Sequence[Place], sizes: Sequence[int], cut: Callable[[], None]) -> Reading:
        """Raises RefusedError where a peer may not read that, or expects something else."""
        with self._lock:
            offer = self._offers.get(lease_id)
            if offer is None:
                raise RefusedError(f"there is no lease {lease_id}: it ended, or never was")
            absent = next((place for place in places if place not in offer.views), None)
            if absent is not None:
                raise RefusedError(f"slot {absent[1]} of KV group {absent[0]} is not in lease {lease_id}")
            views = [offer.views[place] for place in places]
            if [view.nbytes for view in views] != list(sizes):
                raise RefusedError(f"the blocks of lease {lease_id} have other sizes than asked for")
            reading = Reading(offer, views, cut)
            offer.readings.add(reading)
            return reading

    def end(self, reading: Reading) -> bool:
        """Whether the offer stood all the while: what was read until now is whole."""
        with self._lock:
            reading.offer.readings.discard(reading)
            return self._offers.get(reading.offer.lease_id) is reading.offer
