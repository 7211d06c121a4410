"""Which cores ranks get: a memory node's together, none twice, and none at all where there are too few."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from twostroke.backends.host.cores import on_cores
from twostroke.backends.sharded.rank_cores import rank_cores
from twostroke.models.shard import Shard

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system binds no threads to cores")


def test_nodes_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    assert [rank_cores(Shard(rank, 2), 4, tmp_path) for rank in range(2)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [rank_cores(Shard(rank, 4), 2, tmp_path) for rank in range(4)] == [{0, 1}, {4, 5}, {2, 3}, {6, 7}]
    assert rank_cores(Shard(0, 4), 4, tmp_path) is None, "more threads than cores: they are the system's to place"


def test_threads_that_are_started_meanwhile_stay() -> None:
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    seen, go = [], threading.Event()

    def look() -> None:
        go.wait(60)
        seen.append(os.sched_getaffinity(0))

    with on_cores(frozenset({core})):
        thread = threading.Thread(target=look)
        thread.start()
    go.set()
    thread.join(60)
    assert seen == [{core}] and os.sched_getaffinity(0) == before
