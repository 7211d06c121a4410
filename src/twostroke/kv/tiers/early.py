"""KV that moves while its prompt is still being read. Whoever reads tells the engine that will write which blocks are
in host slots, chunk by chunk; that one takes them into slots of its own, which nobody can find. When the request comes
with its handoff they get their names, and only the rest is fetched. What nobody comes for is freed in its time.

All of it is a head start: what did not come so is fetched with the request."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.core.handoff import Announcement, Handoff, HandoffTotals
from twostroke.core.kv_blocks import KVFormat
from twostroke.kv.prefix_index import PrefixNode
from twostroke.kv.tiers.host import HostTier, Kept
from twostroke.kv.tiers.transport import Fetching, Place, Transport

if TYPE_CHECKING:
    from twostroke.kv.tiers.peers import Lease

EARLY_S = 30.0
"""From the last announcement of a prompt: how long its blocks are kept for the request."""
EARLY_FETCH_S = 15.0
EARLY_SHARE = 0.4
"""Of host slots, the most that blocks without a request hold."""
MOST_AT_ONCE = 32
"""Transfers on their way: half of what a transport takes, so that requests find room."""
MOST_REMEMBERED = 10_000
"""Leases that are over, so that nobody announces one again."""


@dataclass(slots=True)
class Told:
    """What of a lease was told to whoever will write."""

    listener: str
    first: int
    """The block from which on: those before it are there."""
    number: int = 0
    counts: list[int] = field(default_factory=list)
    """One a group: of the lease's blocks, those that were told or need not be."""


class EarlyOffers:
    """The side that reads."""

    def __init__(self, transport: Transport, model: str, formats: KVFormat) -> None:
        self._transport, self._model, self._formats = transport, model, formats

    def listener(self, writer: str) -> str | None:
        """Whom it is told to; None: nobody listens, or it is not known who will write."""
        return self._transport.who_listens(writer)

    def grown(self, lease: Lease) -> None:
        """More of its blocks are in host slots, and will not change."""
        told = lease.told
        if told is None:
            return
        places: list[Place] = []
        for group, own in enumerate(lease.kept):
            end = max(0, lease.num_blocks - lease.first[group])
            start = max(told.counts[group], told.first - lease.first[group])
            places += [(kept.group, kept.slot) for kept in own[start:end]]
            told.counts[group] = max(start, end)
        if not places:
            return
        self._transport.offer(lease.lease_id, places)
        announcement = Announcement(
            lease.lease_id, self._transport.described, told.number, tuple(places), self._model, self._formats
        )
        told.number += 1
        self._transport.announce(told.listener, announcement)


@dataclass(slots=True, eq=False)
class Part:
    """Blocks that were announced together, by their places at the owner's."""

    fetching: Fetching
    kept: dict[Place, Kept]


@dataclass(slots=True)
class Coming:
    """Of one prompt."""

    until_s: float
    next_number: int = 0
    is_full: bool = False
    """There was no slot for the next block."""
    parts: list[Part] = field(default_factory=list)


class Joined:
    """Several transfers as one, which begins now: it arrives when all of them have."""

    def __init__(self, parts: Sequence[Fetching]) -> None:
        self.parts = tuple(parts)
        self._began_s = time.monotonic()

    @property
    def is_settled(self) -> bool:
        return all(part.is_settled for part in self.parts) or self.error is not None

    @property
    def is_over(self) -> bool:
        return all(part.is_over for part in self.parts)

    @property
    def arrived(self) -> bool:
        return all(part.arrived for part in self.parts)

    @property
    def began_s(self) -> float:
        return self._began_s

    @property
    def took_s(self) -> float:
        """From now on: what came before is not waited for."""
        return max(0.0, *(part.began_s + part.took_s - self._began_s for part in self.parts))

    @property
    def error(self) -> str | None:
        return next((part.error for part in self.parts if part.is_settled and part.error is not None), None)


class EarlyBlocks:
    """The side that will write."""

    def __init__(
        self, host: HostTier, transport: Transport, model: str, formats: KVFormat, totals: HandoffTotals
    ) -> None:
        self._host, self._transport, self._model, self._formats = host, transport, model, formats
        self._totals = totals
        self._coming: dict[tuple[str, str], Coming] = {}  # by owner and lease
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._leaving: list[Part] = []  # nobody wants these, and bytes may land in them
        self._held = [0] * len(host.num_slots)  # slots, by group

    @property
    def is_busy(self) -> bool:
        return bool(self._coming or self._leaving)

    @property
    def num_held(self) -> int:
        return sum(self._held)

    def settle(self, now_s: float) -> None:
        """Take in what owners have told, and free what nobody came for."""
        for announcement in self._transport.announced():
            if announcement is None or not self._hear(announcement, now_s):
                self._totals.unheard += 1
        for key, coming in list(self._coming.items()):
            for part in [part for part in coming.parts if part.fetching.error is not None]:
                coming.parts.remove(part)
                self._leave(part)
            if coming.until_s < now_s:
                self._end(key)
        for part in [part for part in self._leaving if part.fetching.is_over]:
            self._leaving.remove(part)
            for kept in part.kept.values():
                self._held[kept.group] -= 1
                self._host.forget(kept)
                self._host.unpin(kept)

    def _hear(self, announcement: Announcement, now_s: float) -> bool:
        """Take what is announced; False: it is refused."""
        key = (announcement.peer, announcement.lease_id)
        coming = self._coming.get(key)
        if announcement.number != (0 if coming is None else coming.next_number) or key in self._ended:
            return False  # heard before, or out of its turn
        num_groups, places = len(self._host.num_slots), announcement.places
        fits = announcement.model == self._model and self._formats.has_blocks_of(announcement.formats)
        if not fits or not all(0 <= group < num_groups for group, _ in places) or len(set(places)) < len(places):
            return False
        if coming is None:
            coming = self._coming[key] = Coming(now_s)
        coming.next_number, coming.until_s = announcement.number + 1, now_s + EARLY_S
        kept = {} if coming.is_full or self._num_moving() >= MOST_AT_ONCE else self._take(places)
        coming.is_full = len(kept) < len(places)
        if kept:
            local = [(one.group, one.slot) for one in kept.values()]
            deadline_s = time.monotonic() + EARLY_FETCH_S
            fetching = self._transport.fetch(*key, list(kept), local, deadline_s)
            coming.parts.append(Part(fetching, kept))
        return True

    def _num_moving(self) -> int:
        return sum(not part.fetching.is_over for part in self._parts())

    def _parts(self) -> list[Part]:
        return [*self._leaving, *(part for coming in self._coming.values() for part in coming.parts)]

    def _take(self, places: Iterable[Place]) -> dict[Place, Kept]:
        """Slots for the first of these, as many as may be."""
        taken: dict[Place, Kept] = {}
        for group, slot in places:
            if self._held[group] >= EARLY_SHARE * self._host.num_slots[group]:
                break
            kept = self._host.take_unnamed(group)
            if kept is None:
                break
            self._held[group] += 1
            taken[group, slot] = kept
        return taken

    def _leave(self, part: Part) -> None:
        """Nobody wants these blocks of it."""
        if part.kept:
            self._leaving.append(part)
            self._totals.unused_bytes += part.fetching.arrived * self._num_bytes(part.kept.values())

    def _num_bytes(self, blocks: Iterable[Kept]) -> int:
        return sum(self._formats.groups[kept.group].num_bytes for kept in blocks)

    def _end(self, key: tuple[str, str]) -> None:
        """Nothing of this lease comes early any more."""
        self._ended[key] = None
        if len(self._ended) > MOST_REMEMBERED:
            self._ended.popitem(last=False)
        coming = self._coming.pop(key, None)
        for part in [] if coming is None else coming.parts:
            self._transport.cancel(part.fetching)  # does nothing where its outcome is known
            self._leave(part)

    # With the request

    def drop(self, handoff: Handoff) -> None:
        """Nothing of it is wanted."""
        self._end((handoff.peer, handoff.lease_id))

    def places(self, handoff: Handoff) -> set[Place]:
        """The owner's slots whose blocks are here, or on their way."""
        coming = self._coming.get((handoff.peer, handoff.lease_id))
        parts = [] if coming is None else coming.parts
        return {
            place
            for part in parts
            if part.fetching.error is None
            for place, kept in part.kept.items()
            if not kept.is_lost
        }

    def claim(self, handoff: Handoff, nodes: Mapping[Place, PrefixNode]) -> tuple[list[Kept], list[Fetching], int]:
        """These blocks of it, of which `places` spoke, are whose names they get now: the caller's, each with its pin,
        and the transfers that bring them. How many of their bytes are here. The others are given up."""
        key = (handoff.peer, handoff.lease_id)
        claimed: dict[Place, Kept] = {}
        fetchings, num_bytes = [], 0
        coming = self._coming.get(key)
        for part in [] if coming is None else list(coming.parts):
            own = [place for place in part.kept if place in nodes]
            if not own:
                continue
            for place in own:
                kept = claimed[place] = part.kept.pop(place)
                self._host.name(kept, nodes[place])
                self._held[kept.group] -= 1
                num_bytes += part.fetching.arrived * self._num_bytes([kept])
            fetchings.append(part.fetching)
            self._coming[key].parts.remove(part)
            self._leave(part)  # the rest of it, while the transfer goes on
        self._end(key)
        return [claimed[place] for place in nodes], fetchings, num_bytes

    def pins(self) -> Counter[Kept]:
        return Counter(kept for part in self._parts() for kept in part.kept.values())
