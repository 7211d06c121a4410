"""Several ranks that hold one model together, as a Backend: rank 0 is in this process, each other in one of its own.
Rows, sampling, grammars and drafts are rank 0's, as on every host backend: the others are told a Step as its Batch. All
compute it side by side, and meet twice a layer. A rank that is gone is the end of this backend: the rest hold parts of
a model."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.scores import Scores
from twostroke.backends.sharded.batch_bytes import to_bytes
from twostroke.backends.sharded.lines import RankLostError
from twostroke.backends.sharded.meeting import Meeting
from twostroke.backends.sharded.state_orders import OrderedStates, with_orders
from twostroke.core.errors import BackendLostError

TOGETHER = "the ranks of one model go on together or not at all"


class OtherRanks(Protocol):
    """Those above 0, which wait for rank 0."""

    meeting: Meeting
    """As rank 0 has it."""

    def why_lost(self) -> str:
        """What became of one that is gone."""

    def end(self, limit_s: float = ...) -> None:
        """Close the meeting, and return when all have ended."""


class ShardedBackend(HostBackend):
    def __init__(self, own: HostBackend, others: OtherRanks, max_context: int, vocab_size: int) -> None:
        """`own`: rank 0's part; `vocab_size`: the whole model's."""
        self.name = own.name
        super().__init__(own.layout, max_context, vocab_size)
        self._own, self._others, self._meeting = own, others, others.meeting
        self._lost: str | None = None
        self._process = os.getpid()
        self._ordered = None if own.host_states is None else OrderedStates(own.host_states)
        if self._ordered is not None:
            self.use_states(self._ordered)
        self.notes: tuple[str, ...] = getattr(own, "notes", ())

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self.score(batch).logits

    def score(self, batch: Batch) -> Scores:
        if self._lost is not None:
            raise BackendLostError(self._lost)
        try:
            orders = [] if self._ordered is None else self._ordered.take_orders()
            self._meeting.tell(with_orders(orders, to_bytes(batch, self.layout.block_size)))
            logits = self._meeting.collect(self._own.score(batch).logits)
        except RankLostError:
            raise self._lose(self._others.why_lost()) from None
        except Exception as error:
            raise self._lose(f"rank 0 failed ({type(error).__name__}: {error})") from error
        assert logits is not None
        return Scores.of(logits)

    def _lose(self, why: str) -> BackendLostError:
        """Ranks are no longer at the same place, so none of them is of use."""
        self._lost = f"{why}: {TOGETHER}"
        self._others.end(0.0)
        return BackendLostError(self._lost)

    def why_not_finite(self) -> str:
        return self._own.why_not_finite()

    @property
    def others_share(self) -> float:
        return self._own.others_share

    def close(self) -> None:
        super().close()
        if self._lost is None and os.getpid() == self._process:  # a forked copy has no ranks to end
            self._lost = "this backend is closed"
            with suppress(RankLostError):
                self._meeting.tell(b"")
            self._others.end()
        self._own.close()
