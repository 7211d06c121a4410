"""The replicas of a simulated fleet as they come and go: begun, loading, ready, draining, gone. Knows no request but by
number."""

from __future__ import annotations

from itertools import count

from twostroke.planner.fleet.member import FleetReplica, Member, Role
from twostroke.planner.fleet.report import Moment
from twostroke.planner.fleet.spec import FleetSpec, PoolLook, Scaler

SIGNALS_WINDOW_S = 60.0
"""Over which a server says what its steps took."""


class Pools:
    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._numbers = count()
        self.readers: list[Member] = []
        self.writers: list[Member] = []
        self.gone: list[Member] = []
        self.roles: tuple[Role, ...] = ("prefill", "decode") if spec.prefill else ("decode",)
        for _ in range(spec.prefill):
            self.begin("prefill", 0.0)
        for _ in range(spec.decode):
            self.begin("decode", 0.0)

    def of(self, role: Role) -> list[Member]:
        return self.readers if role == "prefill" else self.writers

    def everybody(self) -> list[Member]:
        return [*self.readers, *self.writers, *self.gone]

    def begin(self, role: Role, now_s: float, start_s: float = 0.0) -> Member:
        member = Member(next(self._numbers), role, FleetReplica(self._spec.replica), now_s, now_s + start_s)
        self.of(role).append(member)
        return member

    def remove(self, member: Member, now_s: float) -> None:
        member.ended_s = now_s
        self.of(member.role).remove(member)
        self.gone.append(member)

    def bury(self, now_s: float) -> list[Member]:
        """Whoever drained, and has nothing left."""
        over = [one for role in self.roles for one in self.of(role) if one.is_draining and not one.journeys]
        for member in over:
            self.remove(member, now_s)
        return over

    def look(self, now_s: float, scaler: Scaler, num_held: int) -> Moment:
        """Ask the scaler, and do as it says: what loads is called off first, then whoever has least to do drains; who
        drains comes back before another is begun."""
        looks: dict[Role, PoolLook] = {}
        for role in self.roles:
            present = [one for one in self.of(role) if not one.is_draining]
            ready = [one for one in present if one.ready_s <= now_s]
            signals = tuple(one.signals(now_s, SIGNALS_WINDOW_S) for one in ready)
            looks[role] = PoolLook(signals, len(present) - len(ready), num_held)
        reasons = []
        for role, (wanted, why) in scaler(now_s, looks).items():
            if sum(not one.is_draining for one in self.of(role)) != wanted:
                reasons.append(why)
            self._follow(role, wanted, now_s)
        unfinished = sum(len(one.journeys) for one in self.writers) + num_held
        return Moment(now_s, len(self.readers), len(self.writers), unfinished, "; ".join(reasons))

    def _follow(self, role: Role, wanted: int, now_s: float) -> None:
        present = [one for one in self.of(role) if not one.is_draining]
        draining = [one for one in self.of(role) if one.is_draining]
        for _ in range(wanted - len(present)):
            if draining:
                draining.pop().is_draining = False
            else:
                self.begin(role, now_s, self._spec.start_s)
        leaving = sorted(present, key=lambda one: (one.ready_s <= now_s, len(one.journeys)))
        for member in leaving[: max(0, len(present) - wanted)]:
            member.is_draining = True
