"""A fleet on a virtual clock: one pool, or a pool that reads and a pool that writes, and KV that moves from one to the
other chunk by chunk while the next chunk is read. Replicas come, drain and fail. Each runs the real scheduler; a router
that knows only what it sent decides who gets what. Nothing here is measured: step times are the cost model's, links
have their line rate."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from twostroke.core.errors import BadRequestError, PromiseError
from twostroke.core.request import Request
from twostroke.core.timing import gaps_of
from twostroke.planner.fleet.journey import Journey
from twostroke.planner.fleet.link import handoff_bytes
from twostroke.planner.fleet.member import Member, Reading, one_token
from twostroke.planner.fleet.pools import Pools
from twostroke.planner.fleet.report import Felt, FleetReport, Handoff, HandoffReport, Moment
from twostroke.planner.fleet.routing import Choice, Router
from twostroke.planner.fleet.spec import Failure, FleetSpec, Scaler
from twostroke.planner.report import Served, SimulationReport
from twostroke.planner.simulate import Prompts, collector_paused
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.advance import SequenceAdvance


class Fleet:
    def __init__(self, spec: FleetSpec, scaler: Scaler | None = None) -> None:
        self.spec, self._scaler = spec, scaler
        self._router = Router(spec.replica, spec.router, spec.seed)
        self._choice = None if spec.link is None else Choice(spec.replica, spec.link, self._router)
        self._pools, self._numbers = Pools(spec), count()
        self._prompts, self._served, self._felt = Prompts(), Served(), Felt()
        self._handoffs: list[Handoff] = []
        self._moments: list[Moment] = []
        self._chunks: list[tuple[float, int, Member, Reading]] = []
        """A heap of chunks that were read and not yet put on a link."""
        self._due: list[tuple[float, int, Journey]] = []
        """A heap of requests that are to be added at their writer."""
        self._held: list[Journey] = []
        """Requests that no replica is there for."""
        self._num_carried_tokens = 0
        """Found at the writer because they were handed over: no hits of the prefix cache."""
        self._num_refused = self._num_kept = self._num_lost = 0
        self._num_failures = self._num_sent_again = self._num_broken = 0
        self._now_s = self._looked_s = 0.0

    # Serving

    def serve(self, trace: Series[TraceRequest]) -> FleetReport:
        """The whole trace, to its last token."""
        for name in {asked.service_level for asked in trace}:
            self.spec.replica.levels.named(name)  # raises for one that is not there
        failures = sorted(self.spec.failures, key=lambda one: one.moment_s, reverse=True)
        began_s = self._now_s = self._looked_s = trace[0].arrival_s if trace else 0.0
        with collector_paused():
            for asked in trace:
                while failures and failures[-1].moment_s <= asked.arrival_s:
                    self._fail(failures.pop())
                self._go_to(asked.arrival_s)
                self._send(Journey(asked, self._prompts.request(asked)), asked.arrival_s)
            while self._is_busy:
                self._go_to(inf if self._scaler is None and not self._held else self._now_s + self.spec.look_s)
        return self._report(began_s)

    @property
    def _is_busy(self) -> bool:
        members = (*self._pools.readers, *self._pools.writers)
        return bool(self._held or self._due or self._chunks) or any(one.journeys for one in members)

    def _go_to(self, moment_s: float) -> None:
        """Play on, stopping to ask the scaler; within a tick nobody but whoever gets a request moves."""
        while self._scaler is not None and self._looked_s + self.spec.look_s <= moment_s:
            self._looked_s += self.spec.look_s
            self._play(self._looked_s)
            self._moments.append(self._pools.look(self._looked_s, self._scaler, len(self._held)))
            self._bury(self._looked_s)
        if moment_s >= self._now_s + self.spec.tick_s:
            self._play(moment_s)
        if self._held:
            self._send_held(moment_s)

    def _send(self, journey: Journey, now_s: float) -> None:
        """Choose who reads it and who writes it."""
        writers = [one for one in self._pools.writers if one.takes(now_s)]
        readers = [one for one in self._pools.readers if one.takes(now_s)]
        if not writers or (self.spec.prefill and not readers):
            self._held.append(journey)
            return
        asked, router = journey.asked, self._router
        if not self.spec.prefill:
            journey.writer = router.choose(writers, asked)
        else:
            journey.writer, journey.reader = router.least_kv(writers, asked), router.choose(readers, asked)
            assert self._choice is not None
            if self.spec.may_stay and self._choice.stays(journey.reader, journey.writer, asked, now_s):
                journey.reader = None
                self._num_kept += 1
        at = journey.reader or journey.writer
        journey.reading_s = router.reading_s(router.num_cached(at, asked), asked.prompt_tokens)
        at.backlog_s += journey.reading_s
        for member in (journey.reader, journey.writer):
            if member is not None:
                journey.enter(member)
                router.note(member, asked)
        if journey.reader is None:
            heappush(self._due, (now_s, next(self._numbers), journey))
            if not self.spec.tick_s:
                self._deliver(now_s)
        else:
            self._take(journey.reader, journey.reader.replica.play_until(now_s))
            self._add(journey, journey.reader, one_token(journey.request), now_s)

    def _add(self, journey: Journey, member: Member, request: Request, now_s: float) -> None:
        try:
            member.replica.add(request, now_s)
            return
        except BadRequestError:
            self._num_refused += 1
        except PromiseError:
            self._served.refuse(journey.asked.service_level)
        journey.end()

    # Playing on

    def _play(self, moment_s: float) -> None:
        """Those who read, then links, then those who write: nothing goes the other way."""
        self._now_s = moment_s
        for member in self._pools.readers:
            self._take(member, member.replica.play_until(moment_s))
        while self._chunks and self._chunks[0][0] <= moment_s:
            _, _, member, reading = heappop(self._chunks)
            self._move(member, reading)
        self._deliver(moment_s)
        for member in self._pools.writers:
            if member.replica.now_s < moment_s and member.replica.busy:
                self._take(member, member.replica.play_until(moment_s))
        self._bury(moment_s)

    def _take(self, member: Member, ended: list[SequenceAdvance]) -> None:
        """What a replica did: chunks go to the link, answers to the report."""
        readings, replica = member.replica.readings, member.replica
        if readings:
            replica.readings = []
        for reading in readings:
            journey = member.journeys.get(reading.request_id)
            if journey is None:
                continue
            if member is journey.reader:
                heappush(self._chunks, (reading.moment_s, next(self._numbers), member, reading))
            elif reading.is_read:
                journey.note_read(member)
        for advance in ended:
            if member.role == "decode":
                self._end(member, advance)

    def _end(self, member: Member, advance: SequenceAdvance) -> None:
        timing = advance.sequence.timing
        journey = member.journeys[advance.sequence.request.request_id]
        if journey.scheduled_s is not None:
            timing.scheduled_s = journey.scheduled_s
            self._num_carried_tokens += timing.cached_tokens
        journey.end()
        self._served.take([timing])
        assert timing.ttft_s is not None
        promise = timing.promise
        is_kept = promise is None or (
            promise.kept_ttft(timing.ttft_s) is not False
            and promise.kept_itl(gaps_of(timing.token_times_s)) is not False
        )
        self._felt.arrival_s.append(timing.arrival_s)
        self._felt.ttft_s.append(timing.ttft_s)
        self._felt.is_kept.append(is_kept)

    def _move(self, reader: Member, reading: Reading) -> None:
        """A chunk was read: its KV goes over the link of both, behind what these move already. Where nothing goes
        early, that is all of it, with the last chunk."""
        journey = reader.journeys.get(reading.request_id)
        if journey is None or journey.reader is not reader or reader.ended_s is not None:
            return
        writer = journey.writer
        assert writer is not None and self.spec.link is not None
        if not (self.spec.link.is_early or reading.is_read):
            return
        if writer.ended_s is not None:  # it failed: what it had is lost
            writer = self._another_writer(journey, reading.moment_s)
            if writer is None:
                return
        if journey.num_moved is None:
            journey.num_moved = writer.replica.num_held(journey.request)
        block = self.spec.replica.layout.block_size
        whole = (journey.asked.prompt_tokens - 1) // block * block
        end, handoff = min(reading.num_tokens // block * block, whole), journey.handoff
        num_bytes = handoff_bytes(self.spec.replica.shape, journey.num_moved, end, whole)
        if num_bytes:
            began_s = max(reading.moment_s, reader.link_free_s, writer.link_free_s)
            seconds = self.spec.link.seconds(num_bytes)
            handoff.there_s = reader.link_free_s = writer.link_free_s = began_s + seconds
            handoff.num_bytes += num_bytes
            handoff.link_s += seconds
        journey.num_moved = max(journey.num_moved, end)
        if reading.is_read:
            handoff.read_s = reading.moment_s
            journey.scheduled_s = reading.scheduled_s
            self._handoffs.append(handoff)
            journey.leave(reader)
            journey.reader = None
            heappush(self._due, (max(reading.moment_s, handoff.there_s), next(self._numbers), journey))

    def _another_writer(self, journey: Journey, now_s: float) -> Member | None:
        writers = [one for one in self._pools.writers if one.takes(now_s)]
        if not writers:
            journey.end()
            self._held.append(journey.afresh())
            return None
        writer = journey.writer = self._router.least_kv(writers, journey.asked)
        journey.enter(writer)
        journey.num_moved = None
        return writer

    def _deliver(self, moment_s: float) -> None:
        """Requests that are read, or need not be, at whoever writes them."""
        while self._due and self._due[0][0] <= moment_s:
            due_s, _, journey = heappop(self._due)
            writer = journey.writer
            if writer is None:
                continue  # its replica failed, and it was sent again
            self._take(writer, writer.replica.play_until(due_s))
            if journey.num_moved and not writer.replica.take_kv(journey.request, journey.num_moved):
                self._num_lost += 1
            self._add(journey, writer, journey.request, due_s)

    # Replicas that go

    def _bury(self, now_s: float) -> None:
        for member in self._pools.bury(now_s):
            self._router.forget(member)

    def _fail(self, failure: Failure) -> None:
        """A replica is gone at once, with all that it held; another is started. Requests that had no token are sent
        again; an answer in its midst is broken: its client gets an error."""
        self._play(failure.moment_s)
        pool = [one for one in self._pools.of(failure.role) if one.ready_s <= failure.moment_s]
        if not pool:
            return
        self._num_failures += 1
        member = pool[failure.place % len(pool)]
        member.replica.settle()
        written = {one.request.request_id for one in member.replica.scheduler.unfinished() if one.num_output}
        self._pools.remove(member, failure.moment_s)
        self._router.forget(member)
        self._pools.begin(member.role, failure.moment_s, self.spec.start_s)
        for name, journey in list(member.journeys.items()):
            if member.role == "decode" and journey.reader is not None:
                continue  # it is still being read: who writes it is chosen anew
            journey.end()
            if member.role == "decode" and name in written:
                self._num_broken += 1
            else:
                self._num_sent_again += 1
                self._send(journey.afresh(), failure.moment_s)

    def _send_held(self, now_s: float) -> None:
        held, self._held = self._held, []
        for journey in held:
            self._send(journey, now_s)

    def check(self) -> None:
        """Prove that no replica has lost a block, or shares one wrongly; raises ConservationError."""
        for member in (*self._pools.readers, *self._pools.writers):
            member.replica.settle()
            member.replica.scheduler.check()

    # What came of it

    def _report(self, began_s: float) -> FleetReport:
        members = self._pools.everybody()
        ended_s = max((one.replica.now_s for one in members), default=began_s)
        replica_s: dict[str, float] = dict.fromkeys(self._pools.roles, 0.0)
        for one in members:
            last_s = ended_s if one.ended_s is None else one.ended_s
            replica_s[one.role] += max(0.0, last_s - max(one.began_s, began_s))
        counts = [one.replica.scheduler.counts() for one in members]
        simulation = SimulationReport.of(
            self._served,
            num_refused=self._num_refused,
            duration_s=max(0.0, ended_s - began_s),
            busy_s=sum(one.replica.busy_s for one in members),
            num_steps=sum(one.replica.num_steps for one in members),
            num_preemptions=sum(one.preemptions for one in counts),
            prefix_hit_tokens=sum(one.prefix_hit_tokens for one in counts) - self._num_carried_tokens,
            replicas=max(1, len(members)),
        )
        busy_share = sum(one.replica.busy_s for one in members) / max(1e-9, sum(replica_s.values()))
        return FleetReport(
            replace(simulation, busy_share=min(1.0, busy_share)),
            HandoffReport.of(self._handoffs, self._num_kept, self._num_lost),
            replica_s,
            self._felt,
            self._moments,
            self._num_failures,
            self._num_sent_again,
            self._num_broken,
        )


def simulate_fleet(spec: FleetSpec, trace: Series[TraceRequest], scaler: Scaler | None = None) -> FleetReport:
    return Fleet(spec, scaler).serve(trace)
