"""KVTiers: what the ledger knows of KV beyond the device. It takes in blocks that the device gives up, says what can
come back, and names the copies that the next step carries. Called by the scheduler's thread alone.

A block that is spilled is written to disk behind it, where there is one, so that host memory can give it up for nothing
and a restart finds it. What comes from disk goes to host memory first, while its request waits: there it is checked,
and a step never waits for a disk. Only blocks of prefixes that may be shared are taken, each under its own salt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from twostroke.core.handoff import Handoff, HandoffTotals
from twostroke.core.kv_blocks import KeptBlocks, KVFormat
from twostroke.core.step import BlockCopy, Step
from twostroke.core.timing import SequenceTiming
from twostroke.kv.block_pool import ConservationError
from twostroke.kv.prefix_index import PrefixNode
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.disk_threads import DiskThreads, Fetch, Look
from twostroke.kv.tiers.files import Found
from twostroke.kv.tiers.host import HostTier, Kept
from twostroke.kv.tiers.peers import PeerFetch, Peers, Wanted
from twostroke.kv.tiers.worth import Worth

SHARED_NAMESPACE = "salt:"
"""What the names of those prefixes begin with that requests may share."""
WRITING_SHARE = 0.5
"""Of host slots, the most that wait to be written to disk; beyond, blocks stay in host memory alone."""
SHORT_WAIT_S = 1e-3
"""For other engines, where the disk may have something meanwhile."""
FETCHED_SHARE = 0.5
"""Of host slots, the most that fetched blocks hold for requests that wait, where there are several."""


@dataclass(slots=True)
class TierTotals:
    """Since the engine started."""

    spilled_blocks: int = 0
    spilled_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0
    """Given up by the device and not taken: no slot was free, or spilling would have slowed decode."""
    unwritten_blocks: int = 0
    """Not written to disk: it was full, failed or fell behind."""
    damaged_blocks: int = 0
    """On disk, and not what was written; or gone."""
    recomputed_tokens: int = 0
    """Found in a tier, and computed again because that was predicted to be faster."""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What the tiers hold, and what moved since the engine started."""

    host_bytes: int
    host_limit_bytes: int
    host_blocks: int
    """That can be found."""
    disk_bytes: int
    """Of all files in the folder, whoever wrote them."""
    disk_limit_bytes: int
    """0: there is no disk."""
    disk_blocks: int
    """That can be found."""
    totals: TierTotals
    handoffs: HandoffTotals | None = None
    """None: this engine is of no fleet."""


class KVTiers:
    def __init__(
        self,
        host: HostTier,
        formats: KVFormat,
        blocks: KeptBlocks,
        *,
        disk: DiskTier | None = None,
        worth: Worth | None = None,
    ) -> None:
        self.host, self.disk, self.blocks = host, disk, blocks
        self.block_bytes = tuple(group.num_bytes for group in formats.groups)
        self.worth = worth or Worth()
        self.totals = TierTotals()
        self.is_open = True
        """Whether it takes in what the device gives up."""
        self.peers: Peers | None = None
        """Other engines, where this one is of a fleet."""
        self._threads = None if disk is None else DiskThreads(disk, blocks.view)
        self._spills: list[tuple[BlockCopy, Kept]] = []
        self._loads: list[tuple[BlockCopy, Kept]] = []
        self._launched: dict[int, list[tuple[BlockCopy, Kept]]] = {}  # by step, spills first
        self._writing: set[Kept] = set()
        self._fetches: dict[int, Fetch | PeerFetch] = {}  # by sequence, until it is let in or gone
        self._given_up: set[Fetch | PeerFetch] = set()  # whose sequence is gone, and which are not over
        self._is_fetched: set[int] = set()
        self._looks: dict[int, Look] = {}  # by sequence that waits for one
        self._has_looked: set[int] = set()
        self._num_fetched = [0] * len(host.num_slots)  # slots that fetches pin, by group

    # What the device gives up

    @staticmethod
    def takes(node: PrefixNode) -> bool:
        """Whether it may be shared at all, and after a restart."""
        return node.namespace.startswith(SHARED_NAMESPACE)

    def offer(self, node: PrefixNode, group: int, block: int) -> None:
        """The device is about to reuse this block: keep a copy, if that is of use and costs nobody anything."""
        if not self.is_open or not self.takes(node):
            return
        kept = self.host.find(node, group)
        if kept is not None:
            self.host.touch(kept)
            return
        num_bytes = self.block_bytes[group]
        if not self.worth.may_spill(num_bytes / self.blocks.spill_bytes_per_s):
            self.totals.dropped_blocks += 1
            return
        kept = self.host.take(node, group)
        if kept is None or not self.host.show(kept):
            self.totals.dropped_blocks += 1
            return
        self._spills.append((BlockCopy(group, block, kept.slot), kept))
        self.totals.spilled_blocks += 1
        self.totals.spilled_bytes += num_bytes

    def load(self, kept: Kept, block: int) -> None:
        """The next step brings a pinned copy back into a block of the device. The pin goes when the step came back."""
        self._loads.append((BlockCopy(kept.group, block, kept.slot), kept))
        self.host.touch(kept)
        kept.origin = ""
        self.totals.loaded_blocks += 1
        self.totals.loaded_bytes += self.block_bytes[kept.group]

    # Steps

    @property
    def has_copies(self) -> bool:
        return bool(self._spills or self._loads)

    @property
    def is_quiet(self) -> bool:
        """Whether every block that was to be loaded is there, as far as is known."""
        return not (self._loads or self._launched) and self.blocks.is_idle

    def launch(self, step_id: int) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The spills and loads that this step carries."""
        if not self.has_copies:
            return (), ()
        spills = tuple(copy for copy, _ in self._spills)
        # Of two loads into one block the second counts: the first's sequence has given way since.
        loads = tuple({(copy.group, copy.block_id): copy for copy, _ in self._loads}.values())
        self._launched[step_id] = [*self._spills, *self._loads]
        self._spills, self._loads = [], []
        return spills, loads

    def landed(self, step: Step, seconds: float) -> None:
        """A step came back: its copies are made, or in the hands of `KeptBlocks.view`."""
        self.worth.step_took(seconds, has_decodes=bool(step.decodes))
        if not (step.spills or step.loads):
            return
        launched = self._launched.pop(step.step_id)
        for place, (_, kept) in enumerate(launched):
            if place < len(step.spills):
                self._write(kept)
            self.host.unpin(kept)

    def failed(self, step: Step, *, launched: bool) -> list[BlockCopy]:
        """A step raised: which loads cannot be relied on, of its own and of those that follow. What it was to spill may
        not be there, and cannot be copied again: a backend that raises late has overwritten it. Where it was never
        `launched`, the next step carries its loads, before its own."""
        if not (step.spills or step.loads):
            return []
        copies, count = self._launched.pop(step.step_id), len(step.spills)
        unspilled = {kept for _, kept in copies[:count]}
        for _, kept in copies[:count]:
            self.host.forget(kept)
            self.host.unpin(kept)
        if not launched:
            self._loads = copies[count:] + self._loads
            lost = []
        else:
            lost = [copy for copy, _ in copies[count:]]
            for _, kept in copies[count:]:
                self.host.forget(kept)
                self.host.unpin(kept)
        return lost + [copy for copy, kept in chain(self._loads, *self._launched.values()) if kept in unspilled]

    # The disk

    def _write(self, kept: Kept) -> None:
        """Have a copy on disk, too, unless the disk is behind."""
        if self._threads is None or self.disk is None or kept.is_lost or self.disk.find(kept.node, kept.group):
            return
        if self.disk.is_paused or len(self._writing) >= WRITING_SHARE * sum(self.host.num_slots):
            self.totals.unwritten_blocks += 1
            return
        self.host.pin(kept)
        self._writing.add(kept)
        self._threads.write(kept)

    def fetch(self, seq_id: int, wanted: Iterable[tuple[PrefixNode, int, Found]]) -> bool:
        """Begin to bring these to host memory, for a sequence that waits; False where that is not possible. It is done
        once for a sequence, so that none waits for the disk for ever."""
        if self._threads is None or seq_id in self._is_fetched:
            return False
        blocks: list[tuple[Kept, Found]] = []
        for node, group, found in wanted:
            kept = self.host.take(node, group)
            if kept is None:
                break
            self._num_fetched[group] += 1
            blocks.append((kept, found))
        if not blocks:
            return False
        self._is_fetched.add(seq_id)
        self._fetches[seq_id] = self._threads.fetch(seq_id, blocks)
        return True

    def look(self, seq_id: int) -> bool:
        """Whether this sequence shall wait for a look at what other processes have written to the disk; once for each,
        and not if there was one a moment ago."""
        if self._threads is None or seq_id in self._has_looked:
            return False
        self._has_looked.add(seq_id)
        look = self._threads.look()
        if look is not None:
            self._looks[seq_id] = look
        return look is not None

    def fetch_room(self, group: int) -> int:
        """Slots that one more sequence may have: all that no copy holds, if nobody else waits with fetched blocks."""
        num_slots, num_fetched = self.host.num_slots[group], self._num_fetched[group]
        free = num_slots - self.host.num_pinned(group)
        return min(free, max(0, int(FETCHED_SHARE * num_slots) - num_fetched)) if any(self._num_fetched) else free

    def may_fetch(self, seq_id: int) -> bool:
        """Whether a sequence has not asked yet."""
        return self._threads is not None and seq_id not in self._is_fetched

    def is_fetching(self, seq_id: int) -> bool:
        fetch, look = self._fetches.get(seq_id), self._looks.get(seq_id)
        return (fetch is not None and not fetch.is_settled) or (look is not None and not look.is_over)

    @property
    def num_fetching(self) -> int:
        num_looks = sum(not look.is_over for look in self._looks.values())
        return num_looks + sum(not fetch.is_settled for fetch in self._fetches.values())

    def settle(self) -> None:
        """Take in what the disk's threads and other engines have done."""
        if self.peers is not None:
            for settled in self.peers.settle():
                self._take_in(settled)
            self._free_given_up()
        if self._threads is None:
            return
        for kept, done in self._threads.written():
            self._writing.discard(kept)
            self.host.unpin(kept)
            self.totals.written_blocks += done
            self.totals.written_bytes += done * self.block_bytes[kept.group]
            self.totals.unwritten_blocks += not done
        for fetch in self._threads.fetched():
            self._take_in(fetch)

    def _take_in(self, fetch: Fetch | PeerFetch) -> None:
        fetch.is_settled = True
        for (kept, _), arrived in zip(fetch.blocks, fetch.arrived, strict=True):
            if arrived and self.host.show(kept):
                kept.origin = "disk" if isinstance(fetch, Fetch) else "peer"
                self.totals.fetched_blocks += kept.origin == "disk"
                self.totals.fetched_bytes += self.block_bytes[kept.group] * (kept.origin == "disk")
            elif not arrived:
                self.totals.damaged_blocks += isinstance(fetch, Fetch)
                self.host.forget(kept)
        if isinstance(fetch, Fetch):
            self.worth.disk_took(fetch.arrived_bytes, fetch.took_s)
        self._free_given_up()

    def _free_given_up(self) -> None:
        """Slots of fetches that nobody wants any more, and that cannot fill them any more."""
        if self._given_up:
            for fetch in [fetch for fetch in self._given_up if fetch.is_settled and fetch.is_over]:
                self._given_up.remove(fetch)
                self._unpin(fetch)

    def _unpin(self, fetch: Fetch | PeerFetch) -> None:
        for kept, _ in fetch.blocks:
            self._num_fetched[kept.group] -= 1
            self.host.unpin(kept)

    def let_in(self, seq_id: int) -> None:
        """A sequence waits no more: it has what it needs of what was fetched for it, or is gone."""
        self._is_fetched.discard(seq_id)
        self._has_looked.discard(seq_id)
        self._looks.pop(seq_id, None)
        fetch = self._fetches.pop(seq_id, None)
        if fetch is None:
            return
        if fetch.is_settled and fetch.is_over:
            self._unpin(fetch)
            return
        self._given_up.add(fetch)  # its slots are being filled
        if self.peers is not None and isinstance(fetch, PeerFetch) and not fetch.is_settled:
            self.peers.give_up(fetch)

    def wait(self, timeout_s: float) -> None:
        """Until the disk's threads, or another engine, have done something."""
        if self.peers is not None and self.peers.is_busy:
            self.peers.transport.wait(timeout_s if self._threads is None else min(timeout_s, SHORT_WAIT_S))
        elif self._threads is not None:
            self._threads.wait(timeout_s)

    def fetch_from_peer(self, seq_id: int, handoff: Handoff, wanted: Sequence[Wanted], timing: SequenceTiming) -> None:
        """Begin to bring these from another engine to host memory, for a sequence that waits."""
        assert self.peers is not None
        fetch = self.peers.fetch(seq_id, handoff, wanted, timing)
        if fetch is not None:
            for kept, _ in fetch.blocks:
                self._num_fetched[kept.group] += 1
            self._is_fetched.add(seq_id)
            self._fetches[seq_id] = fetch

    # Forgetting

    def forget(self, node: PrefixNode) -> None:
        """The content of this block is not to be trusted, in any group."""
        for group in range(len(self.host.num_slots)):
            if (kept := self.host.find(node, group)) is not None:
                self.host.forget(kept)
            if self.disk is not None:
                self.disk.forget(node, group)

    def clear(self) -> None:
        """Forget all, on disk too. Copies in flight end where nobody finds them."""
        self.host.clear()
        if self._threads is not None:
            self._threads.clear()

    def write_kept(self, until_s: float) -> None:
        """Write what only host memory has, until that moment of `time.monotonic`; for an engine that ends."""
        if self.disk is None or self._threads is None:
            return
        for kept in list(self.host.kept_latest_first()):
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                return
            if not kept.pins and self.disk.find(kept.node, kept.group) is None:
                self.disk.write(kept.node, kept.group, self.blocks.view(kept.group, kept.slot))
        self._threads.flush(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        if self._threads is not None:
            self._threads.close()

    def counts(self) -> TierCounts:
        host, disk, sizes = self.host, self.disk, self.block_bytes
        return TierCounts(
            host_bytes=sum(host.num_used(group) * size for group, size in enumerate(sizes)),
            host_limit_bytes=sum(count * size for count, size in zip(host.num_slots, sizes, strict=True)),
            host_blocks=len(host),
            disk_bytes=0 if disk is None else disk.used_bytes,
            disk_limit_bytes=0 if disk is None else disk.limit_bytes,
            disk_blocks=0 if disk is None else len(disk),
            totals=replace(self.totals),
            handoffs=None if self.peers is None else self.peers.totals(),
        )

    # Proof

    def check(self) -> None:
        """Every slot is free or holds one block, and is pinned by exactly the copies that are on their way."""
        pins: Counter[Kept] = Counter()
        for _, kept in chain(self._spills, self._loads, *self._launched.values()):
            pins[kept] += 1
        pins.update(self._writing)
        if self.peers is not None:
            pins.update(self.peers.pins())
        fetched = [kept for fetch in (*self._fetches.values(), *self._given_up) for kept, _ in fetch.blocks]
        pins.update(fetched)
        if Counter(kept.group for kept in fetched) != Counter(dict(enumerate(self._num_fetched))):
            raise ConservationError(f"fetches hold {len(fetched)} host slots, and {self._num_fetched} are counted")
        self.host.check(pins)
