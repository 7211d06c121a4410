"""Several ranks that hold one model together on cards, as a Backend: rank 0 is in this process, each other in one of
its own. Every rank launches every Step, and they meet on their devices; rank 0 samples, and holds answers to grammars.
A rank that is gone is the end of this backend."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from twostroke.backends.interface import Backend, MaskingBackend, RankOnCard, RanksPartedError, Ticket, refuse_drafts
from twostroke.backends.sharded.backend import TOGETHER, OtherRanks
from twostroke.backends.sharded.lines import RankLostError
from twostroke.backends.sharded.step_bytes import to_bytes
from twostroke.core.errors import BackendLostError
from twostroke.core.grammar import Grammars
from twostroke.core.step import Step, StepResult

LOOK_S = 0.1
"""How often rank 0 sees to the others while cards wait for each other."""


class WatchedRanks(OtherRanks, Protocol):
    def why_lost(self, otherwise: str | None = None) -> str:
        """`otherwise`: if all are there."""

    def is_one_gone(self) -> bool:
        """Asked from a thread of its own."""


class RankZero(Backend, MaskingBackend, RankOnCard, Protocol):
    """This process's part."""


@dataclass(slots=True, eq=False)
class CardTicket:
    _own: Ticket
    _backend: CardBackend

    @property
    def ready(self) -> bool:
        return self._own.ready

    def result(self) -> StepResult:
        """What a device found whose partner is gone is nothing."""
        try:
            return self._own.result()
        finally:
            self._backend.raise_if_lost()


class CardBackend:
    max_drafts = 0
    why_no_drafts = "ranks on cards verify no drafts yet"

    def __init__(self, own: RankZero, others: WatchedRanks) -> None:
        self.name = own.name
        self._own, self._others = own, others
        self._lost: str | None = None
        self._losing = threading.Lock()
        self._process = os.getpid()
        self.notes: tuple[str, ...] = getattr(own, "notes", ())
        self._ends = threading.Event()
        threading.Thread(target=_look, args=(weakref.ref(self), self._ends), name="ranks", daemon=True).start()

    def use_grammars(self, grammars: Grammars) -> None:
        self._own.use_grammars(grammars)

    def launch(self, step: Step) -> CardTicket:
        self.raise_if_lost()
        refuse_drafts(self, step)
        try:
            self._others.meeting.tell(to_bytes(step))
            return CardTicket(self._own.launch(step), self)
        except (RankLostError, RanksPartedError) as error:
            raise self.lose(cause=str(error)) from None
        except Exception as error:
            raise self.lose(f"rank 0 failed ({type(error).__name__}: {error})") from error

    def raise_if_lost(self) -> None:
        if self._lost is not None:
            raise BackendLostError(self._lost)

    def lose_if_one_is_gone(self) -> None:
        if self._others.is_one_gone():
            self.lose()

    def lose(self, why: str | None = None, cause: str = "") -> BackendLostError:
        """Ranks are no longer at the same place, so none of them is of use. `why`: None: another is gone; or if all
        are there, they did not meet because of `cause`."""
        with self._losing:
            if self._lost is None:
                lost = why or self._others.why_lost(f"ranks did not meet ({cause})")
                self._lost = f"{lost}: {TOGETHER}"
                self._ends.set()
                self._own.abandon()
                self._others.end(0.0)
        return BackendLostError(self._lost)

    def close(self) -> None:
        self._ends.set()
        if self._lost is None and os.getpid() == self._process:  # a forked copy has no ranks to end
            self._lost = "this backend is closed"
            with suppress(RankLostError):
                self._others.meeting.tell(b"")
            self._others.end()
        self._own.close()


def _look(backend: weakref.ref[CardBackend], ends: threading.Event) -> None:
    """Cards may wait for one that is gone without an end: then nobody of this process does."""
    while not ends.wait(LOOK_S):
        if (found := backend()) is None:
            return
        found.lose_if_one_is_gone()
        del found
