"""Which cores a rank computes on: a run of those that this process may use, one memory node after another, so that on a
machine with several sockets a rank's weights and KV lie beside its cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from twostroke.models.shard import Shard

NODES = Path("/sys/devices/system/node")


def rank_cores(shard: Shard, threads: int, nodes: Path = NODES) -> frozenset[int] | None:
    """`threads`: of each rank. None: they are left to the system, as there are fewer cores than threads."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        return None
    allowed = _by_node(affinity(0), nodes)
    if len(allowed) < threads * shard.size:
        return None
    first, last = shard.of(len(allowed))
    return frozenset(allowed[first:last])


def _by_node(cores: set[int], nodes: Path) -> list[int]:
    """In the order of their memory nodes, as far as the system names them."""
    node_of: dict[int, int] = {}
    for file in nodes.glob("node[0-9]*/cpulist"):
        with contextlib.suppress(OSError, ValueError):
            for core in _listed(file.read_text(encoding="ascii")):
                node_of[core] = int(file.parent.name.removeprefix("node"))
    return sorted(cores, key=lambda core: (node_of.get(core, 0), core))


def _listed(text: str) -> Iterator[int]:
    """Numbers of "0-3,8"."""
    for run in text.strip().split(","):
        if run:
            first, _, last = run.partition("-")
            yield from range(int(first), int(last or first) + 1)
