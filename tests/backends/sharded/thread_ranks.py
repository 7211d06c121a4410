"""Ranks as threads of this process, over the meetings that processes use: what they compute is the same, and every
family can be tried without starting processes for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.interface import BackendFactory, BackendSettings, RankedFactory
from twostroke.backends.sharded.backend import ShardedBackend
from twostroke.backends.sharded.lines import Line, RankLostError
from twostroke.backends.sharded.meeting import Meeting, RelayMeeting, SharedMeeting, shared_bytes
from twostroke.backends.sharded.rank_process import _compute
from twostroke.core.formats import ANY_FORMATS, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.shard import Shard, shard_checkpoint


def meetings(widths: Sequence[int], transport: str = "shared") -> list[Meeting]:
    """One a rank."""
    lines: list[dict[int, Line]] = [{} for _ in widths]
    for one, two in combinations(range(len(widths)), 2):
        pair = socket.socketpair()
        lines[one][two], lines[two][one] = Line(two, pair[0]), Line(one, pair[1])
    if transport == "relay":
        return [RelayMeeting(rank, own, widths) for rank, own in enumerate(lines)]
    memory = os.memfd_create("test")
    os.ftruncate(memory, shared_bytes(widths))
    found: list[Meeting] = [SharedMeeting(rank, own, widths, memory) for rank, own in enumerate(lines)]
    os.close(memory)
    return found


class ThreadCrew:
    """All ranks but the first."""

    def __init__(self, meeting: Meeting, others: Sequence[tuple[HostBackend, Meeting]]) -> None:
        self.meeting, self._others = meeting, others
        self._threads = [threading.Thread(target=self._run, args=pair, daemon=True) for pair in others]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _run(own: HostBackend, meeting: Meeting) -> None:
        try:
            _compute(own, meeting)
        except RankLostError:
            pass
        finally:
            meeting.close()
            own.close()

    def why_lost(self) -> str:
        return "a thread is gone"

    def end(self, limit_s: float = 60.0) -> None:
        self.meeting.close()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive()


@dataclass(frozen=True, slots=True)
class ThreadRanks:
    """Makes backends as the factory of several processes does."""

    own: BackendFactory
    size: int
    transport: str = "shared"

    @property
    def name(self) -> str:
        return self.own.name

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        return self.own.formats(checkpoint, wish)

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> ShardedBackend:
        factory, size = self.own, self.size
        assert isinstance(factory, RankedFactory)
        parts = [shard_checkpoint(checkpoint, Shard(rank, size), factory.rank_unit) for rank in range(size)]
        for part in parts:
            assert factory.supports(part) is None
        met = meetings([part.spec.num_logits for part in parts], self.transport)
        own, *others = (
            _created(factory, part, layout, settings, meeting) for part, meeting in zip(parts, met, strict=True)
        )
        crew = ThreadCrew(met[0], list(zip(others, met[1:], strict=True)))
        return ShardedBackend(own, crew, settings.max_context, checkpoint.spec.vocab_size)


@contextmanager
def thread_ranks(
    factory: BackendFactory,
    checkpoint: Checkpoint,
    size: int,
    layout: KVLayout,
    settings: BackendSettings,
    transport: str = "shared",
) -> Iterator[ShardedBackend]:
    backend = ThreadRanks(factory, size, transport).create(checkpoint, layout, settings)
    try:
        yield backend
    finally:
        backend.close()


def _created(
    factory: BackendFactory, part: Checkpoint, layout: KVLayout, settings: BackendSettings, meeting: Meeting
) -> HostBackend:
    made = factory.create(part, layout, replace(settings, join=meeting.add_up))
    assert isinstance(made, HostBackend)
    return made
