"""KV by NIXL: one-sided reads, by shared memory on one host and by the network's fastest way between hosts. The
connection of `sockets.py` stays beside it for what NIXL has not: who may read, whether a lease still stands when the
last byte is there, and a sign of life. So an engine without NIXL can still be read from, and read here. Messages beside
those of `desk.py`:

- `lend`: as `read`, with `agent`, the name of the peer's agent if it is known. Answered with `agent`, and where that is
  another one with `metadata` and `runs`, where its slots lie.
- `end`, after a `lend`: the bytes are there. Answered with `whole`.

NIXL moves nothing unless both sides look. The owner looks while something is lent, the reader while it reads; both
sleep otherwise."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.cluster.transfer.channel import Channel, DeadlineError, Message, PeerGoneError, TransferError
from twostroke.cluster.transfer.desk import STALL_S
from twostroke.cluster.transfer.interface import Contact, Place, Slots, TransferConfig
from twostroke.cluster.transfer.nixl_agent import INSTALL, Agent, RemoteAgent, library
from twostroke.cluster.transfer.slot_memory import SlotMemory
from twostroke.cluster.transfer.sockets import CANCELLED, Job, SocketTransport, sentence
from twostroke.core.errors import BadRequestError

LOOK_S = 0.001
"""Between two looks of the owner: 3% of a core while something is lent."""
READ_LOOK_S = 0.0002
"""Between two looks of the reader: it is what is waited for."""
LINGER_S = 1.0
"""That the owner goes on looking for a reader it cut off, so that what was asked for can end."""
LENT_S = 3600.0
"""That a reader may take. It is long because a reader's slots are not free before its read has ended, and an owner that
does not look never lets it end."""
LATE_LOOK_S = 0.005
GRACE_S = 0.5
"""For a read that nobody waits for any more, before its peer is taken for one that does not answer."""
MOST_REMOTES = 64
"""Peers that are kept connected; the longest unused go first."""


def missing() -> str | None:
    """Why it cannot be used here."""
    try:
        library()
    except ImportError as problem:
        return f"NIXL is missing ({problem}; {INSTALL})"
    except OSError as problem:
        return f"NIXL does not load ({problem})"
    return None


@dataclass(eq=False)
class _Remote:
    """A peer's agent, and who reads from it."""

    agent: RemoteAgent
    num_reads: int = 0
    num_late: int = 0
    """Of these, nobody waits any more. No further one begins meanwhile."""
    is_gone: bool = False
    """The last one out removes it."""


class NixlTransport(SocketTransport):
    name = "nixl"

    def __init__(self, config: TransferConfig, slots: Slots, places: Sequence[Place]) -> None:
        if _is_loopback(config.host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        try:
            self._agent = Agent(config.engine_id, SlotMemory.of(slots, places))
        except TransferError as problem:
            raise BadRequestError(f"NIXL did not start ({problem}): sockets can carry KV in its place") from problem
        self._remotes: dict[Contact, _Remote] = {}
        self._peers_lock = threading.Lock()
        self._num_lent, self._look_until_s = 0, 0.0
        self._is_lent = threading.Event()
        self._is_ending = False
        try:
            super().__init__(config, slots, places)
        except BadRequestError:
            self._agent.close()
            raise
        self._looker = threading.Thread(target=self._look, name="kv-nixl", daemon=True)
        self._looker.start()

    def _prepare(self) -> None:
        self._desk.answers["lend"] = self._lend

    # The owner's side

    def _lend(self, channel: Channel, message: Message) -> None:
        with self._desk.reading(channel, message, self._let_end) as reading:
            answer: Message = {"agent": self._agent.name}
            if message.get("agent") != self._agent.name:
                answer["metadata"] = base64.b64encode(self._agent.metadata).decode()
                answer["runs"] = self._agent.memory.described()
            with self._lent():
                channel.send(answer, time.monotonic() + STALL_S)
                if channel.receive(time.monotonic() + LENT_S).get("ask") != "end":
                    raise TransferError("it did not say that it has read")
            self._desk.end(channel, reading)

    def _let_end(self) -> None:
        """Of a read whose offer ends: it is not cut, since only a read that ends frees its reader's slots."""

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        with self._peers_lock:
            self._num_lent += 1
            self._is_lent.set()
        linger_s = LINGER_S
        try:
            yield
            linger_s = 0.0
        finally:
            with self._peers_lock:
                self._num_lent -= 1
                self._look_until_s = max(self._look_until_s, time.monotonic() + linger_s)

    def _look(self) -> None:
        while True:
            self._is_lent.wait()
            if self._is_ending:
                return
            with contextlib.suppress(TransferError):
                self._agent.look()
            time.sleep(LOOK_S)
            with self._peers_lock:
                if not self._num_lent and time.monotonic() >= self._look_until_s and not self._is_ending:
                    self._is_lent.clear()

    # The reader's side

    def _move(self, job: Job) -> None:
        peer, deadline_s = job.fetching.peer, job.fetching.deadline_s
        if peer.transport != self.name or job.landing is not None:  # a landing's memory is not registered
            super()._move(job)
            return
        with self._line(job) as channel:
            known = self._known(peer)
            answer = self._ask(channel, job, "lend", agent=known.agent.name if known else "")
            remote = self._met(peer, answer)
            with self._lock:
                job.channel = None  # not to be cut by `cancel`: the owner looks for as long as it stands
            self._read(job, remote, channel)
            self._hold(job, channel)
            channel.send({"ask": "end"}, deadline_s)
            if channel.receive(deadline_s).get("whole") is not True:
                raise TransferError("the lease ended while it was read")

    def _known(self, peer: Contact) -> _Remote | None:
        with self._peers_lock:
            return self._remotes.get(peer)

    def _met(self, peer: Contact, answer: Message) -> _Remote:
        """The peer's agent as it is now, with one more read of it."""
        with self._peers_lock:
            known, unused = self._remotes.get(peer), []
            if known is None or known.agent.name != answer.get("agent"):
                if known is not None:  # it was started anew
                    known.is_gone = True
                    unused.append(known)
                known = self._new(answer)
            if known.num_late:
                raise TransferError("it does not answer: an earlier read of it is late")
            self._remotes.pop(peer, None)
            self._remotes[peer] = known  # the latest used comes last
            idle = [other for other in list(self._remotes)[:-MOST_REMOTES] if not self._remotes[other].num_reads]
            unused += [self._remotes.pop(other) for other in idle]
            known.num_reads += 1
            for old in unused:
                if not old.num_reads:
                    self._agent.remove(old.agent)
            return known

    def _new(self, answer: Message) -> _Remote:
        metadata = answer.get("metadata")
        if not isinstance(metadata, str):
            raise TransferError("it does not say how it is reached by NIXL")
        try:
            decoded = base64.b64decode(metadata, validate=True)
        except ValueError as problem:
            raise TransferError("it does not say how it is reached by NIXL") from problem
        return _Remote(self._agent.add(decoded, SlotMemory.read(answer.get("runs"))))

    def _read(self, job: Job, remote: _Remote, channel: Channel) -> None:
        """Returns with all bytes there, or raises TransferError with no more to come."""
        handle: Any = None
        try:
            handle = self._agent.prepare(remote.agent, job.remote, job.local)
            is_done = self._agent.begin(handle)
            while not is_done:
                if job.is_cancelled:
                    raise TransferError(CANCELLED)
                if time.monotonic() > job.fetching.deadline_s:
                    raise DeadlineError("it was not there by its deadline")
                if not channel.is_quiet:
                    raise TransferError("the lease ended while it was read, or its owner did")
                time.sleep(READ_LOOK_S)
                is_done = self._agent.is_done(handle)
        except TransferError as problem:
            self._news.settled(job.fetching, sentence(job.fetching.peer, problem))  # its request goes on without it
            self._see_off(remote, handle, is_gone=isinstance(problem, PeerGoneError))
            raise
        self._agent.release(handle)
        self._leave(remote)

    def _see_off(self, remote: _Remote, handle: Any, *, is_gone: bool) -> None:
        """Returns when no byte of a failed read can land any more: it ended, its peer is gone, or this side closes.
        Nothing else stops it: not a release, not the removal of its peer."""
        began_s, is_late = time.monotonic(), False
        while handle is not None and not is_gone and not self._is_closed:
            try:
                if self._agent.is_done(handle):
                    break
            except PeerGoneError:
                is_gone = True
            except TransferError:
                pass  # it may land all the same
            if not is_late and time.monotonic() - began_s > GRACE_S:
                is_late = True
                with self._peers_lock:
                    remote.num_late += 1
            time.sleep(LATE_LOOK_S)
        if handle is not None:
            self._agent.release(handle)
        with self._peers_lock:
            remote.num_late -= is_late
            remote.is_gone = remote.is_gone or is_gone
        self._leave(remote)

    def _leave(self, remote: _Remote) -> None:
        with self._peers_lock:
            remote.num_reads -= 1
            if not remote.is_gone or remote.num_reads:
                return
            for peer in [peer for peer, known in self._remotes.items() if known is remote]:
                del self._remotes[peer]
            self._agent.remove(remote.agent)

    def close(self) -> None:
        super().close()
        with self._peers_lock:
            self._is_ending = True
            self._is_lent.set()
        self._looker.join()
        for remote in self._remotes.values():
            self._agent.remove(remote.agent)
        self._remotes.clear()
        self._agent.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


TRANSPORT = NixlTransport
