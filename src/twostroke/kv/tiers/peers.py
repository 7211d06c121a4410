"""KV that goes to another engine, and KV that comes from one: who holds which host slot for that, and until when.
Called by the scheduler's thread alone; bytes are moved by a transport, in threads of its own.

What goes: as a prompt is read, its full blocks are copied to host slots and pinned under its lease. With the end of
reading the lease is offered to whoever knows its name. It ends when the other engine says so, or in its time, which the
other's heartbeats extend.

What comes: a request names another engine's lease. Slots are taken and pinned for it, and the transport fills them
while it waits. They stay pinned until the transport says that no byte can land any more, whoever still wants them; what
did not come in time is read here.

What goes while it is still being read, and comes so: `early.py`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from twostroke.core.handoff import Handoff, HandoffRecord, HandoffTotals
from twostroke.core.kv_blocks import BlockConverter, KeptBlocks, KVFormat
from twostroke.core.timing import SequenceTiming
from twostroke.kv.prefix_index import PrefixNode
from twostroke.kv.tiers.early import EarlyBlocks, EarlyOffers, Joined, Told
from twostroke.kv.tiers.giving_way import who_gives_way
from twostroke.kv.tiers.host import HostTier, Kept
from twostroke.kv.tiers.landing import Conversion, Landing
from twostroke.kv.tiers.transport import Place, Transport

LEASE_S = 30.0
"""From the end of reading, for the other engine to ask."""
BEAT_S, BEATEN_S = 5.0, 20.0
"""Whoever waits for bytes says so this often, and is given so much longer each time."""
FETCH_S = 15.0
"""What does not come within this is read here."""
LEASED_SHARE = 0.8
"""Of host slots, the most that leases hold."""
FIRST_BYTES_PER_S = 1e9
"""Until a transfer was timed."""
WEIGHT_OF_LATEST = 0.3

BlockOf = Callable[[int, int, PrefixNode], int | None]
"""Of a group and a place in a prompt, which is named: the block of the device that holds it."""


@dataclass(slots=True, eq=False)
class Lease:
    lease_id: str
    first: tuple[int, ...]
    """One a group: the block from which on it is wanted."""
    num_wanted: int
    kept: list[list[Kept]]
    num_blocks: int = 0
    """From the first on, that are in host slots."""
    tenant: str = ""
    """Whose prompt it is."""
    granted_s: float | None = None
    """None: it is still being read."""
    until_s: float = inf
    is_asked: bool = False
    """Somebody said that he waits for it."""
    is_full: bool = False
    """No slot was left for the next one."""
    told: Told | None = None
    """None: nobody was told of it before the end of reading."""

    def blocks(self) -> Iterator[Kept]:
        for own in self.kept:
            yield from own


class Wanted(NamedTuple):
    """A block that is to come from another engine."""

    node: PrefixNode
    group: int
    sources: tuple[int, ...]
    """The owner's slots that hold its tokens: one, where blocks are of one size."""
    skip: int = 0
    """Tokens of the first of them that come before it."""


@dataclass(slots=True, eq=False)
class PeerFetch:
    """The blocks of one sequence that come from another engine."""

    seq_id: int
    blocks: tuple[tuple[Kept, None], ...]
    handoff: Handoff
    fetching: Joined
    timing: SequenceTiming
    num_bytes: int
    beat_s: float
    early_bytes: int = 0
    """Of those, that were here when it began."""
    arrived: list[bool] = field(default_factory=list)
    is_settled: bool = False
    """The scheduler's thread knows its outcome."""

    @property
    def is_over(self) -> bool:
        return self.fetching.is_over


class Peers:
    def __init__(
        self,
        host: HostTier,
        blocks: KeptBlocks,
        transport: Transport,
        model: str,
        formats: KVFormat,
        converter: BlockConverter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: whose weights make KV here. `formats`: what its bytes mean."""
        self.transport, self.model, self.formats, self.converter = transport, model, formats, converter
        self.bytes_per_s = FIRST_BYTES_PER_S
        self._host, self._blocks = host, blocks
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._fetches: list[PeerFetch] = []
        self._totals = HandoffTotals()
        self.early_offers = EarlyOffers(transport, model, formats)
        self.early = EarlyBlocks(host, transport, model, formats, self._totals)

    # What goes

    def begin(self, lease_id: str, first: Sequence[int], num_wanted: int, tenant: str = "") -> Lease:
        """A prompt of `num_wanted` full blocks is read for another engine."""
        kept: list[list[Kept]] = [[] for _ in first]
        lease = self._leases[lease_id] = Lease(lease_id, tuple(first), num_wanted, kept, tenant=tenant)
        return lease

    def lease(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    def take(self, lease: Lease, nodes: Sequence[PrefixNode], block_of: BlockOf) -> None:
        """These blocks are computed, and no launched step writes them: copy what is not copied yet. `nodes`: from the
        first block on."""
        for index in range(lease.num_blocks, min(len(nodes), lease.num_wanted)):
            if lease.is_full or not self._take_block(lease, index, nodes[index], block_of):
                lease.is_full = True
                return
            lease.num_blocks = index + 1

    def _take_block(self, lease: Lease, index: int, node: PrefixNode, block_of: BlockOf) -> bool:
        for group in range(len(lease.kept)):
            if index < lease.first[group]:
                continue
            kept = self._host.find(node, group)
            if kept is not None:
                self._host.pin(kept)
                self._host.touch(kept)
            else:
                block = block_of(group, index, node)
                if block is None or not self._may_lease(lease, group):
                    return False
                kept = self._host.take(node, group)
                if kept is None:
                    return False
                self._blocks.copy_out(group, block, kept.slot)
                self._host.show(kept)
            lease.kept[group].append(kept)
        return True

    def _may_lease(self, lease: Lease, group: int) -> bool:
        """Whether it may have one more slot: where all are leased, others that hold them too long give way."""
        while self._num_leased(group) >= LEASED_SHARE * self._host.num_slots[group]:
            other = who_gives_way(self._leases.values(), lease, group, self._clock(), self.transport.is_read)
            if other is None:
                return False
            self._totals.expired += 1
            self.drop(other.lease_id)
        return True

    def _num_leased(self, group: int) -> int:
        return sum(len(lease.kept[group]) for lease in self._leases.values())

    def grant(self, lease: Lease, read_s: float, queue_s: float) -> Handoff | None:
        """Reading is over: what another engine needs to take it; None: there is nothing to take."""
        is_cut = lease.num_blocks < lease.num_wanted
        if not lease.num_blocks or (is_cut and any(lease.first)):  # a window needs its last blocks
            self.drop(lease.lease_id)
            return None
        for group, own in enumerate(lease.kept):  # a block that failed in one group was taken for those before it
            for kept in own[lease.num_blocks - lease.first[group] :]:
                self._host.unpin(kept)
            del own[lease.num_blocks - lease.first[group] :]
        lease.granted_s = self._clock()
        lease.until_s = lease.granted_s + LEASE_S
        self.transport.offer(lease.lease_id, [(kept.group, kept.slot) for kept in lease.blocks()])
        slots = tuple(tuple(kept.slot for kept in own) for own in lease.kept)
        num_tokens = lease.num_blocks * self.formats.block_size
        described = self.transport.described
        self._totals.granted += 1
        self._totals.granted_tokens += num_tokens
        return Handoff(lease.lease_id, described, num_tokens, slots, self.model, self.formats, LEASE_S, read_s, queue_s)

    def note_left(self) -> None:
        """A prompt that was to be read for another engine is left to it."""
        self._totals.left += 1

    def drop(self, lease_id: str) -> None:
        """Nobody may take it any more. Whoever was reading is cut off, and does not use what it has."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        if lease.until_s != inf or lease.told is not None:
            self.transport.withdraw(lease_id)
        for kept in lease.blocks():
            self._host.unpin(kept)

    # What comes

    def fetch(
        self, seq_id: int, handoff: Handoff, wanted: Sequence[Wanted], timing: SequenceTiming
    ) -> PeerFetch | None:
        """Bring these blocks to host slots. None: there is no room for them, and the lease is given back."""
        self.transport.listen(handoff.peer)
        taken: list[Kept] = []
        num_bytes = self.num_bytes(handoff, wanted)
        rest, early = self._parted(handoff, wanted)
        for one in rest if self._may_land(handoff, num_bytes) else ():
            kept = self._host.take(one.node, one.group)
            if kept is None:
                break
            taken.append(kept)
        if len(taken) < len(rest):
            for kept in taken:
                self._host.forget(kept)
                self._host.unpin(kept)
            self.refuse(handoff, timing, "host memory has no room for it (--kv-host-gb)")
            return None
        now_s, local = self._clock(), [(kept.group, kept.slot) for kept in taken]
        landed, fetchings, early_bytes = self.early.claim(handoff, early)
        if rest:
            landing = local if self.fits(handoff) else self._landing(handoff, rest, taken)
            until_s = now_s + min(FETCH_S, handoff.lease_s)
            remote = _sources(rest)
            fetchings.append(self.transport.fetch(handoff.peer, handoff.lease_id, remote, landing, until_s))
        blocks = tuple((kept, None) for kept in (*landed, *taken))
        fetch = PeerFetch(seq_id, blocks, handoff, Joined(fetchings), timing, num_bytes, now_s, early_bytes)
        self._fetches.append(fetch)
        return fetch

    def _parted(self, handoff: Handoff, wanted: Sequence[Wanted]) -> tuple[list[Wanted], dict[Place, PrefixNode]]:
        """Those that are to be fetched, and by their places those that came early, or are on their way."""
        places = self.early.places(handoff)
        early = {(one.group, one.sources[0]): one.node for one in wanted if (one.group, one.sources[0]) in places}
        return [one for one in wanted if (one.group, one.sources[0]) not in early], early

    def fits(self, handoff: Handoff) -> bool:
        """Whether its bytes are blocks here as they are."""
        return self.formats.has_blocks_of(handoff.formats)

    def num_bytes(self, handoff: Handoff, wanted: Sequence[Wanted]) -> int:
        """That would come."""
        return sum(handoff.formats.groups[group].num_bytes for group, _ in _sources(wanted))

    def _may_land(self, handoff: Handoff, num_bytes: int) -> bool:
        """What is turned into blocks takes memory of its own on its way: in all, no more than host slots do."""
        if self.fits(handoff):
            return True
        sizes = (form.num_bytes * count for form, count in zip(self.formats.groups, self._host.num_slots, strict=True))
        landing = sum(fetch.num_bytes for fetch in self._fetches if not self.fits(fetch.handoff))
        return landing + num_bytes <= sum(sizes)

    def _landing(self, handoff: Handoff, wanted: Sequence[Wanted], taken: Sequence[Kept]) -> Landing:
        places = {place: number for number, place in enumerate(_sources(wanted))}
        conversions = []
        for one, kept in zip(wanted, taken, strict=True):
            sources = tuple(places[one.group, slot] for slot in one.sources)
            view = self._blocks.view(kept.group, kept.slot)
            conversions.append((Conversion(one.group, sources, one.skip), view))
        return Landing(self.converter, handoff.formats, [group for group, _ in places], conversions)

    def refuse(self, handoff: Handoff, timing: SequenceTiming, why: str) -> None:
        """It is not taken: the prompt is read here, and its owner need not keep it."""
        self._totals.refused += 1
        self.early.drop(handoff)
        self.transport.release(handoff.peer, handoff.lease_id)
        name = self.transport.name_of(handoff.peer)
        timing.handoff = HandoffRecord(name, 0, 0, 0.0, handoff.read_s, handoff.queue_s, why)

    def give_up(self, fetch: PeerFetch) -> None:
        """Its sequence is gone; its slots are not free before it `is_over`."""
        for part in fetch.fetching.parts:
            self.transport.cancel(part)

    def seconds_of(self, handoff: Handoff, wanted: Sequence[Wanted]) -> float:
        """Predicted, to fetch what is not here yet of these."""
        return self.seconds(self.num_bytes(handoff, self._parted(handoff, wanted)[0]))

    def seconds(self, num_bytes: int) -> float:
        """Predicted, to fetch this many bytes."""
        return num_bytes / self.bytes_per_s

    # Both

    def settle(self) -> list[PeerFetch]:
        """Take in what the transport has done. Returns the fetches whose outcome is known now."""
        now_s = self._clock()
        for note in self.transport.poll():
            self._hear(note.kind, note.lease_id, now_s)
        for lease in list(self._leases.values()):
            if lease.until_s < now_s:
                self._totals.expired += 1
                self.drop(lease.lease_id)
        self.early.settle(now_s)
        settled = [fetch for fetch in self._fetches if fetch.fetching.is_settled]
        for fetch in settled:
            self._fetches.remove(fetch)
            self._end(fetch)
        for fetch in self._fetches:
            if now_s - fetch.beat_s > BEAT_S:
                fetch.beat_s = now_s
                self.transport.beat(fetch.handoff.peer, [fetch.handoff.lease_id])
        return settled

    def _hear(self, kind: str, lease_id: str, now_s: float) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.until_s == inf:
            return  # it is over, or was never offered
        if kind == "alive":
            lease.is_asked = True
            lease.until_s = max(lease.until_s, now_s + BEATEN_S)
        elif kind == "done":
            self._totals.taken += 1
            self.drop(lease_id)

    def _end(self, fetch: PeerFetch) -> None:
        fetching, handoff = fetch.fetching, fetch.handoff
        fetch.arrived = [fetching.arrived] * len(fetch.blocks)
        self.transport.release(handoff.peer, handoff.lease_id)
        num_tokens, num_bytes = (handoff.num_tokens, fetch.num_bytes) if fetching.arrived else (0, 0)
        why_not = None if fetching.arrived else fetching.error or "it did not arrive"
        fetch.timing.handoff = HandoffRecord(
            self.transport.name_of(handoff.peer),
            num_tokens,
            num_bytes,
            fetching.took_s,
            handoff.read_s,
            handoff.queue_s,
            why_not,
            fetch.early_bytes if fetching.arrived else 0,
        )
        totals = self._totals
        totals.early_bytes += fetch.early_bytes if fetching.arrived else 0
        totals.fetched += fetching.arrived
        totals.failed += not fetching.arrived
        totals.fetched_tokens += num_tokens
        totals.fetched_bytes += num_bytes
        totals.fetch_s += fetching.took_s if fetching.arrived else 0.0
        moved_s = sum(part.took_s for part in fetching.parts)
        if num_bytes and moved_s > 0.0:
            self.bytes_per_s += WEIGHT_OF_LATEST * (num_bytes / moved_s - self.bytes_per_s)

    def totals(self) -> HandoffTotals:
        return replace(self._totals, leases=len(self._leases), early_blocks=self.early.num_held)

    @property
    def is_busy(self) -> bool:
        """Whether something is leased or fetched: then `settle` has to be called now and then."""
        return bool(self._leases or self._fetches or self.early.is_busy)

    def pins(self) -> Counter[Kept]:
        """By leases, and by what came early: fetches are the tiers' to count."""
        return Counter(kept for lease in self._leases.values() for kept in lease.blocks()) + self.early.pins()

    def close(self) -> None:
        self.transport.close()


def _sources(wanted: Sequence[Wanted]) -> list[Place]:
    """What is to come for them, each once."""
    return list(dict.fromkeys((one.group, slot) for one in wanted for slot in one.sources))
