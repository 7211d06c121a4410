"""Ranks on cards as threads of this process: each with a backend of its own, and gloo between them, as between
processes. Triton's interpreter knows one launch at a time, so they take turns, and hand over where they meet."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from tests.backends.cuda.engines import Sizes
from tests.backends.cuda.tables import fused_up_to

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.ranks import CardRanks, GlooTransport
from twostroke.backends.interface import CardPlace, RanksPartedError
from twostroke.backends.sharded.card_backend import CardBackend
from twostroke.backends.sharded.lines import Line, RankLostError
from twostroke.backends.sharded.meeting import Meeting, RelayMeeting
from twostroke.backends.sharded.rank_process import _launch
from twostroke.core.formats import Formats
from twostroke.core.step import Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.shard import Shard, shard_checkpoint

UNIT = 16
"""Of tiny models."""
LIMIT_S = 120.0
CPU = torch.device("cpu")


class TakingTurns:
    """A transport that lets other ranks compute while it waits for them."""

    is_captured = False

    def __init__(self, place: CardPlace, turn: threading.Lock) -> None:
        self._turn = turn
        with self._others_turn():
            self._gloo = GlooTransport(place)

    def add_up(self, values: torch.Tensor) -> None:
        with self._others_turn():
            self._gloo.add_up(values)

    def lay_out(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        with self._others_turn():
            self._gloo.lay_out(part, parts)

    def spread(self, values: torch.Tensor) -> None:
        with self._others_turn():
            self._gloo.spread(values)

    def abandon(self) -> None:
        self._gloo.abandon()

    @contextmanager
    def _others_turn(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class InTurn:
    """A backend that launches when it is its turn."""

    def __init__(self, own: CudaBackend, turn: threading.Lock) -> None:
        self._own, self._turn = own, turn

    def launch(self, step: Step) -> object:
        with self._turn:
            return self._own.launch(step)

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)


@dataclass
class ThreadRanks:
    """Those above 0."""

    meeting: Meeting
    threads: Sequence[threading.Thread]

    def is_one_gone(self) -> bool:
        return False

    def why_lost(self, otherwise: str | None = None) -> str:
        return otherwise or "a thread is gone"

    def end(self, limit_s: float = LIMIT_S) -> None:
        self.meeting.close()
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextmanager
def card_ranks(checkpoint: Checkpoint, size: int, sizes: Sizes, few_rows: int | None = 0) -> Iterator[CardBackend]:
    """`few_rows`: see `Sizes.on_device`."""
    parts = [shard_checkpoint(checkpoint, Shard(rank, size), UNIT) for rank in range(size)]
    widths = tuple(part.spec.num_logits for part in parts)
    store, turn, lines, others = os.memfd_create("ranks"), threading.Lock(), {}, []
    failures: list[BaseException] = []

    def made(rank: int) -> CudaBackend:
        place = CardPlace(rank, widths, "gloo", f"/proc/self/fd/{store}")
        with turn:
            return CudaBackend(
                parts[rank],
                sizes.layout(checkpoint),
                device=CPU,
                formats=Formats("f32", "f32", "f32"),
                max_context=sizes.max_context,
                max_tokens_per_step=sizes.step_tokens,
                max_running=sizes.max_rows,
                choices=fused_up_to(few_rows, "cpu", torch.float32),
                max_drafts=0,
                ranks=CardRanks(place, CPU, TakingTurns(place, turn)),
            )

    def run(rank: int, line: Line) -> None:
        meeting = RelayMeeting(rank, {0: line}, widths)
        try:
            with suppress(RankLostError, RanksPartedError):
                _launch(InTurn(made(rank), turn), meeting)  # type: ignore[arg-type]
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            meeting.close()

    for rank in range(1, size):
        own, theirs = socket.socketpair()
        lines[rank] = Line(rank, own)
        others.append(threading.Thread(target=run, args=(rank, Line(0, theirs)), daemon=True))
        others[-1].start()
    zero = InTurn(made(0), turn)
    backend = CardBackend(zero, ThreadRanks(RelayMeeting(0, lines, widths), others))  # type: ignore[arg-type]
    try:
        yield backend
    finally:
        backend.close()
        os.close(store)
        assert not failures
