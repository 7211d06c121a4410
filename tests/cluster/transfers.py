"""Drives the processes of `peer.py` from a test."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.peer import Places, content
from twostroke.cluster.transfer import nixl

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER_KEY = "5a" * 32, "a5" * 32
SIZES, COUNTS = [36_864, 5_000, 131_072], [300, 40, 64]
"""Three KV groups: of usual blocks, of ones that fit no page, of large ones."""
LARGE = [2 << 20], [64]
"""One of blocks that take a while."""


class Engine:
    """A process with host slots and a transport."""

    def __init__(
        self,
        transport: str,
        engine_id: str,
        *,
        key: str = KEY,
        sizes: list[int] = SIZES,
        counts: list[int] = COUNTS,
        port: int = 0,
        kept: bool = False,
    ) -> None:
        name, _, way = transport.partition("-")
        settings = {"transport": name, "engine_id": engine_id, "key": key, "sizes": sizes, "counts": counts}
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | ({"UCX_TLS": way} if way else {})
        self.engine_id, self.sizes, self.counts = engine_id, sizes, counts
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.peer", json.dumps(settings | {"port": port, "kept": kept})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self._contact = ""

    @property
    def contact(self) -> str:
        """Waits until it has started."""
        if not self._contact:
            self._contact = self.heard()
        return self._contact

    @property
    def port(self) -> int:
        return int(json.loads(self.contact)["port"])

    def do(self, name: str, /, **given: Any) -> Any:
        self.begin(name, **given)
        return self.heard()

    def begin(self, name: str, /, **given: Any) -> None:
        """Without waiting for the answer."""
        assert self.contact and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name} | given) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a peer ended with {self.process.wait()}"
        return json.loads(line)

    def is_stopped(self) -> bool:
        state = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2]
        return state.startswith("T")

    def signal(self, sign: int) -> None:
        self.process.send_signal(sign)
        if sign == signal.SIGKILL:
            self.process.wait()

    def places(self, group: int | None = None) -> Places:
        groups = range(len(self.counts)) if group is None else (group,)
        return [(number, slot) for number in groups for slot in range(self.counts[number])]

    def some(self, count: int, seed: int) -> Places:
        """As many of each group as others of the same seed, if there are enough, in random places."""
        chance, taken = random.Random(seed), [0] * len(self.counts)
        slots = [
            random.Random(f"{self.engine_id} {seed} {group}").sample(range(have), have)
            for group, have in enumerate(self.counts)
        ]
        places = []
        while len(places) < count:
            group = chance.randrange(len(self.counts))
            if taken[group] < self.counts[group]:
                places.append((group, slots[group][taken[group]]))
                taken[group] += 1
        return places

    def expected(self, seed: int, places: Places) -> list[str]:
        """Digests of what `fill` puts there."""
        return [hashlib.sha256(content(seed, group, slot, self.sizes[group])).hexdigest() for group, slot in places]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def wait_for(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, "it did not come to hold"
        time.sleep(0.01)


Start = Callable[..., Engine]
LIMIT_S = 60.0
"""Many times what a quiet machine takes."""
SOON_S = LIMIT_S / 2
"""Long before anything is late."""
needs_nixl = pytest.mark.skipif(nixl.missing() is not None, reason=nixl.missing() or "")
WAYS = [
    "sockets",
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("nixl-tcp", marks=[needs_nixl, pytest.mark.slow]),
]
FAR_WAYS = ["sockets", pytest.param("nixl-tcp", marks=needs_nixl)]
"""Where a stopped peer stops its bytes: on one host NIXL reads a stopped process's memory all the same."""


def fetched(reader: Engine, owner: Engine, lease: str, remote: list, local: list, seconds: float = LIMIT_S) -> dict:
    number = reader.do("fetch", peer=owner.contact, lease=lease, remote=remote, local=local, seconds=seconds)
    return reader.do("until", number=number, what="is_over", limit_s=seconds + LIMIT_S)


def serves_still(owner: Engine, reader: Engine) -> None:
    """A block goes over, whatever was before."""
    lease = f"still-{secrets.token_hex(4)}"
    owner.do("offer", lease=lease, places=[(0, 0)])
    assert fetched(reader, owner, lease, [(0, 0)], [(0, 1)])["arrived"]
    owner.do("withdraw", lease=lease)
