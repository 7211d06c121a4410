"""One engine's side of a transfer, as a process of its own: host slots and a real transport, told by lines of JSON what
to do. The slots are an engine's own (`kept`), or plain memory where a quick start matters. It is run as
`python -m tests.cluster.peer SETTINGS`, by `transfers.py`."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

import numpy as np

from twostroke.cluster.transfer import open_transport
from twostroke.cluster.transfer.interface import Contact, Fetching, Slots
from twostroke.core.kv_blocks import BlockFormat

Places = list[tuple[int, int]]


class NoStore:
    """A backend whose blocks are of these sizes, and stay where they are."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def block_formats(self) -> tuple[BlockFormat, ...]:
        return tuple(BlockFormat((0,), None, "uint8", 1, (("layer", 1), ("byte", size))) for size in self._sizes)

    def copy_out(self, group: int, block: int, into: Any) -> None:
        raise NotImplementedError

    def copy_in(self, group: int, block: int, data: Any) -> None:
        raise NotImplementedError


class PlainSlots:
    def __init__(self, sizes: list[int], counts: list[int]) -> None:
        self._groups = [np.zeros((count, size), dtype=np.uint8) for size, count in zip(sizes, counts, strict=True)]

    def view(self, group: int, slot: int) -> memoryview:
        return memoryview(self._groups[group][slot])


def kept_slots(sizes: list[int], counts: list[int]) -> Slots:
    from twostroke.backends.host.kept_blocks import HostKeptBlocks

    return HostKeptBlocks(NoStore(sizes), counts)


def content(seed: int, group: int, slot: int, num_bytes: int) -> bytes:
    """What a slot holds, as anybody can tell."""
    return np.random.default_rng([seed, group, slot]).bytes(num_bytes)


class Peer:
    def __init__(
        self, transport: str, engine_id: str, key: str, sizes: list[int], counts: list[int], port: int, kept: bool
    ) -> None:
        self._blocks = kept_slots(sizes, counts) if kept else PlainSlots(sizes, counts)
        self._sizes, self._counts = sizes, counts
        places = [(group, slot) for group, count in enumerate(counts) for slot in range(count)]
        self.transport, self._why = open_transport(
            transport, self._blocks, places, bytes.fromhex(key), engine_id=engine_id, port=port
        )
        self._fetches: list[Fetching] = []
        self._notes: list[list[Any]] = []

    def contact(self) -> str:
        return self.transport.contact.described()

    def fill(self, seed: int) -> None:
        for group, count in enumerate(self._counts):
            for slot in range(count):
                self._blocks.view(group, slot)[:] = content(seed, group, slot, self._sizes[group])

    def scribble(self, places: Places, byte: int) -> None:
        for group, slot in places:
            np.frombuffer(self._blocks.view(group, slot), dtype=np.uint8)[:] = byte

    def holds(self, places: Places, byte: int) -> bool:
        """Whether these have that in every byte."""
        return all((np.frombuffer(self._blocks.view(*place), dtype=np.uint8) == byte).all() for place in places)

    def digests(self, places: Places) -> list[str]:
        return [hashlib.sha256(self._blocks.view(group, slot)).hexdigest() for group, slot in places]

    def offer(self, lease: str, places: Places) -> None:
        self.transport.offer(lease, [(group, slot) for group, slot in places])

    def withdraw(self, lease: str) -> bool:
        return self.transport.withdraw(lease)

    def fetch(self, peer: str, lease: str, remote: Places, local: Places, seconds: float) -> int:
        there, here = ([(group, slot) for group, slot in places] for places in (remote, local))
        self._fetches.append(self.transport.fetch(Contact.read(peer), lease, there, here, time.monotonic() + seconds))
        return len(self._fetches) - 1

    def interrupt(
        self, peer: str, lease: str, remote: Places, local: Places, seconds: float, pid: int, sign: int
    ) -> tuple[int, bool]:
        """Fetch, and send the owner a signal as soon as the first bytes are here. The slots must hold zeros. Returns
        the fetch, and whether its last bytes were still missing then."""
        first = np.frombuffer(self._blocks.view(*local[0]), dtype=np.uint8)
        last = np.frombuffer(self._blocks.view(*local[-1]), dtype=np.uint8)
        number = self.fetch(peer, lease, remote, local, seconds)
        while not first[0] and not self._fetches[number].is_settled:
            time.sleep(0)
        os.kill(pid, sign)
        return number, not last[-1] and not self._fetches[number].is_settled

    def state(self, number: int) -> dict[str, Any]:
        fetching = self._fetches[number]
        names = ("is_settled", "is_over", "arrived", "error", "took_s", "num_bytes")
        return {name: getattr(fetching, name) for name in names}

    def until(self, number: int, what: str, limit_s: float) -> dict[str, Any]:
        """Wait as an engine does: by the transport's news."""
        until_s = time.monotonic() + limit_s
        while not getattr(self._fetches[number], what) and time.monotonic() < until_s:
            self.transport.wait(0.05)
            self.notes()
        return self.state(number)

    def notes(self) -> list[list[Any]]:
        """All so far: kind, lease, and of a fetch its number."""
        for note in self.transport.poll():
            number = None if note.fetching is None else self._fetches.index(note.fetching)
            self._notes.append([note.kind.value, note.lease_id, number])
        return self._notes

    def cancel(self, number: int) -> None:
        self.transport.cancel(self._fetches[number])

    def beat(self, peer: str, leases: list[str]) -> None:
        self.transport.beat(Contact.read(peer), leases)

    def release(self, peer: str, lease: str) -> None:
        self.transport.release(Contact.read(peer), lease)

    def listen(self, peer: str, names: list[str]) -> None:
        self.transport.listen(Contact.read(peer), names)

    def who_listens(self, name: str) -> str | None:
        return self.transport.who_listens(name)

    def tell(self, name: str, words: list[str]) -> None:
        for word in words:
            self.transport.tell(name, word)

    def heard(self, count: int, limit_s: float) -> list[list[str]]:
        """So many words, each with the engine that said it; sooner where the bell does not ring for so long."""
        found: list[list[str]] = []
        while len(found) < count and select.select([self.transport.bell], [], [], limit_s)[0]:
            found += [[peer.engine_id, word] for peer, word in self.transport.heard()]
        return found

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> float:
        began_s = time.monotonic()
        self.transport.close()
        return time.monotonic() - began_s


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own end ends it
    peer = Peer(**json.loads(sys.argv[1]))
    print(json.dumps(peer.contact()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(peer, asked.pop("do"))(**asked)), flush=True)


if __name__ == "__main__":
    main()
