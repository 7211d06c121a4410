"""A request's way through a simulated fleet: who reads it, who writes it, and what of its KV is where."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twostroke.core.request import Request
from twostroke.planner.fleet.report import Handoff
from twostroke.planner.trace import TraceRequest

if TYPE_CHECKING:
    from twostroke.planner.fleet.member import Member


@dataclass(slots=True, eq=False)
class Journey:
    asked: TraceRequest
    request: Request
    writer: Member | None = None
    reader: Member | None = None
    """None: it is read where it is written."""
    reading_s: float = 0.0
    """Predicted, at whoever reads it."""
    num_moved: int | None = None
    """Tokens whose KV is at the writer, or on its way there; None: nothing was asked for yet."""
    handoff: Handoff = field(default_factory=Handoff)
    scheduled_s: float | None = None

    def afresh(self) -> Journey:
        """The same request, nothing of it done. Its name is new: the old one may be known where it was."""
        return Journey(self.asked, replace(self.request, request_id=f"{self.request.request_id}+"))

    def enter(self, member: Member) -> None:
        """It is sent there."""
        member.journeys[self.request.request_id] = self
        member.kv_tokens += self.asked.prompt_tokens

    def leave(self, member: Member) -> None:
        """It has nothing to do there any more."""
        if member.journeys.pop(self.request.request_id, None) is not None:
            member.kv_tokens -= self.asked.prompt_tokens
        if member is (self.reader or self.writer):
            self.note_read(member)

    def note_read(self, member: Member) -> None:
        member.backlog_s = max(0.0, member.backlog_s - self.reading_s)
        self.reading_s = 0.0

    def end(self) -> None:
        """It is over, however."""
        for member in (self.reader, self.writer):
            if member is not None:
                self.leave(member)
        self.reader = self.writer = None
