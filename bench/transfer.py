"""KV from one process's host slots into another's, measured on this machine: `python -m bench.transfer`.

The blocks of a prompt of 1,000 tokens on SmolLM2, and 256 MiB, by each transport and by a plain memory copy of as many
bytes within one process, in turns; medians. Times are those that a request waits: from the call until all bytes are
there and its lease is known to have stood. `--ucx-tls tcp` has NIXL go as between two hosts."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np

from twostroke.backends.host.kept_blocks import Bytes, HostKeptBlocks
from twostroke.cluster.transfer import TRANSPORTS, choose, open_transport
from twostroke.cluster.transfer.interface import Contact, Transport
from twostroke.core.errors import BadRequestError
from twostroke.core.kv_blocks import BlockFormat

BLOCK_BYTES = 368_640
"""Of SmolLM2: 16 tokens, 30 layers, 3 KV heads of 64 keys and values in float32."""
COUNTS = {"1,000 tokens": 63, "256 MiB": (256 << 20) // BLOCK_BYTES}
LEASE = "bench"
LIMIT_S = 60.0


class Store:
    """Sizes alone: no block is on a device here."""

    def block_formats(self) -> tuple[BlockFormat, ...]:
        return (BlockFormat((0,), None, "uint8", 1, (("layer", 1), ("byte", BLOCK_BYTES))),)

    def copy_out(self, group: int, block: int, into: Bytes) -> None:
        raise NotImplementedError

    def copy_in(self, group: int, block: int, data: Bytes) -> None:
        raise NotImplementedError


class Side:
    """Slots that are touched, and with a key every transport that this machine has over them."""

    def __init__(self, engine_id: str, byte: int, key: bytes | None = None) -> None:
        self.blocks = HostKeptBlocks(Store(), [max(COUNTS.values())])
        self.places = [(0, slot) for slot in range(max(COUNTS.values()))]
        for place in self.places:
            np.frombuffer(self.blocks.view(*place), dtype=np.uint8)[:] = byte
        self.transports: dict[str, Transport] = {}
        for name in TRANSPORTS if key is not None else ():
            try:
                choose(name)
            except BadRequestError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            self.transports[name] = open_transport(name, self.blocks, self.places, key or b"", engine_id=engine_id)[0]

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        self.blocks.close()


def own(key: bytes) -> None:
    """The other process: offers all until its standard input ends."""
    side = Side("owner", 1, key)
    for transport in side.transports.values():
        transport.offer(LEASE, side.places)
    print(json.dumps({name: transport.contact.described() for name, transport in side.transports.items()}), flush=True)
    sys.stdin.read()
    side.close()


def fetch_s(
    transport: Transport, owner: Contact, remote: Sequence[tuple[int, int]], local: Sequence[tuple[int, int]]
) -> float:
    fetching = transport.fetch(owner, LEASE, remote, local, time.monotonic() + LIMIT_S)
    while not fetching.is_over:
        transport.wait(LIMIT_S)
        transport.poll()
    if not fetching.arrived:
        raise SystemExit(f"it did not arrive: {fetching.error}")
    return fetching.took_s


def copy_s(source: Side, target: Side, remote: Sequence[tuple[int, int]], local: Sequence[tuple[int, int]]) -> float:
    pairs = [
        (np.frombuffer(target.blocks.view(*there), dtype=np.uint8), np.frombuffer(source.blocks.view(*here), np.uint8))
        for here, there in zip(remote, local, strict=True)
    ]
    began_s = time.perf_counter()
    for there, here in pairs:
        there[:] = here
    return time.perf_counter() - began_s


def measure(contacts: dict[str, str], reader: Side, source: Side, repeats: int) -> None:
    chance = random.Random(1)
    print(f"{'':14}{'':12}{'median ms':>10}{'GB/s':>8}{'of a copy':>11}")
    for what, count in COUNTS.items():
        places = [chance.sample(reader.places, count) for _ in range(2)]
        ways: dict[str, Callable[[], float]] = {"memory copy": partial(copy_s, source, reader, *places)}
        for name in reader.transports:
            if name in contacts:
                ways[name] = partial(fetch_s, reader.transports[name], Contact.read(contacts[name]), *places)
        for way in ways.values():
            way()  # connections are made, and memory is there
        taken_s: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats):
            names = list(ways)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken_s[name].append(ways[name]())
        copied_s = median(taken_s["memory copy"])
        for name, seconds in taken_s.items():
            typical_s = median(seconds)
            rate = count * BLOCK_BYTES / typical_s / 1e9
            print(f"{what:14}{name:12}{typical_s * 1e3:10.2f}{rate:8.2f}{copied_s / typical_s:11.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns; medians are taken over them")
    parser.add_argument("--ucx-tls", help="UCX_TLS for both sides, like tcp; unset, UCX takes the fastest")
    parser.add_argument("--owner", metavar="KEY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner:
        own(bytes.fromhex(options.owner))
        return
    if options.ucx_tls:
        os.environ["UCX_TLS"] = options.ucx_tls  # read when an agent is made, and inherited
    key = os.urandom(32)
    command = [sys.executable, "-m", "bench.transfer", "--owner", key.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        contacts = json.loads(owner.stdout.readline())
        reader, source = Side("reader", 0, key), Side("source", 1)
        measure(contacts, reader, source, options.repeats)
        owner.stdin.close()
        reader.close()
        source.close()


if __name__ == "__main__":
    main()
