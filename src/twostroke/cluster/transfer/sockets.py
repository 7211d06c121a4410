"""KV over plain TCP: the fallback where there is no NIXL, and its oracle in tests. Blocks go from the owner's slots
into the socket and from the socket into the reader's slots, with no copy between. Lengths are agreed on before a byte
moves, and a last message says that the lease stood to the end. There is no checksum on top of TCP's: a pass over all
bytes takes about as long as to move them, and both ends have proven that they belong together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twostroke.cluster.transfer.audience import Audience
from twostroke.cluster.transfer.channel import Channel, Message, RefusedError, TransferError
from twostroke.cluster.transfer.couriers import Couriers
from twostroke.cluster.transfer.desk import Desk
from twostroke.cluster.transfer.ears import Bell, Ears
from twostroke.cluster.transfer.interface import Contact, Fetching, Landing, Note, Place, Slots, TransferConfig, is_id
from twostroke.cluster.transfer.lines import Lines
from twostroke.cluster.transfer.listener import Listener
from twostroke.cluster.transfer.news import News
from twostroke.cluster.transfer.offers import Offers

MOST_FETCHES = 64
"""At once; more are refused, and their prompts read here."""
LAST_NOTES_S = 1.0
"""What an end waits for notes that are on their way."""
CANCELLED = "it was cancelled"
CLOSED = "this engine's transfers were closed"


def missing() -> str | None:
    """Why it cannot be used here; it always can."""
    return None


@dataclass(slots=True, eq=False)
class Job:
    """One fetch at work, on a thread of its own."""

    fetching: Fetching
    remote: tuple[Place, ...]
    local: tuple[Place, ...]
    """Empty: it has a landing."""
    views: list[memoryview]
    """Of the local slots, or of the landing."""
    landing: Landing | None = None
    channel: Channel | None = None
    is_cancelled: bool = False
    thread: threading.Thread | None = None


def sentence(peer: Contact, problem: TransferError) -> str:
    return f"KV from {peer.engine_id} at {peer.host}:{peer.port}: {problem}"


class SocketTransport:
    name = "sockets"

    def __init__(self, config: TransferConfig, slots: Slots, places: Sequence[Place]) -> None:
        """`places`: all that may ever be offered or filled."""
        self._slots, self._places = slots, tuple(places)
        self._news = News()
        self._offers = Offers(slots)
        self._desk = Desk(self._offers, self._news)
        self._lines = Lines(config.key)
        self._couriers = Couriers(self._lines)
        self._audience, self._ears = Audience(), Ears(self._lines)
        self._desk.answers["listen"] = self._audience.serve
        self._jobs: dict[Fetching, Job] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._prepare()
        self._listener = Listener(config, self._desk.serve)
        self.contact = Contact(self.name, config.advertised_host or config.host, self._listener.port, config.engine_id)

    def _prepare(self) -> None:
        """What must be there before the first caller is."""

    # The owner's side

    def offer(self, lease_id: str, places: Sequence[Place]) -> None:
        if not is_id(lease_id):
            raise ValueError(f"{lease_id!r} cannot name a lease")
        self._offers.add(lease_id, places)

    def withdraw(self, lease_id: str) -> bool:
        self._offers.withdraw(lease_id)
        return True

    def is_read(self, lease_id: str) -> bool:
        return self._offers.is_read(lease_id)

    def who_listens(self, name: str) -> str | None:
        return self._audience.find(name)

    def tell(self, name: str, word: str) -> None:
        self._audience.tell(name, word)

    # The reader's side

    def fetch(
        self, peer: Contact, lease_id: str, remote: Sequence[Place], local: Sequence[Place] | Landing, deadline_s: float
    ) -> Fetching:
        landing, places = (None, tuple(local)) if isinstance(local, Sequence) else (local, ())
        views = [self._slots.view(*place).cast("B") for place in places] if landing is None else list(landing.views)
        if len(remote) != len(views):
            raise ValueError(f"{len(remote)} blocks were to be brought into {len(views)} slots")
        fetching = Fetching(peer, lease_id, sum(view.nbytes for view in views), deadline_s)
        job = Job(fetching, tuple(remote), places, views, landing)
        with self._lock:
            refusal = CLOSED if self._is_closed else None
            if len(self._jobs) >= MOST_FETCHES:
                refusal = f"{MOST_FETCHES} fetches are on their way, and that is the most at once"
            if refusal is None:
                job.thread = threading.Thread(target=self._run, args=(job,), name="kv-fetch", daemon=True)
                self._jobs[fetching] = job
                job.thread.start()
        if refusal is not None:
            self._news.settled(fetching, refusal)
            self._news.over(fetching)
        return fetching

    def _run(self, job: Job) -> None:
        peer, error = job.fetching.peer, None
        try:
            self._move(job)
            if job.landing is not None and not job.is_cancelled:
                job.landing.land(job.fetching.deadline_s)
        except TransferError as problem:
            error = sentence(peer, problem)
        except Exception as problem:  # whatever it is, it is this fetch's alone
            error = f"KV from {peer.engine_id}: {type(problem).__name__}: {problem}"
        with self._lock:
            del self._jobs[job.fetching]
        self._news.settled(job.fetching, error)
        self._news.over(job.fetching)

    def _move(self, job: Job) -> None:
        """Returns when all bytes are there and whole, else raises TransferError. No byte lands after either."""
        deadline_s = job.fetching.deadline_s
        with self._line(job) as channel:
            num_bytes = self._ask(channel, job, "read").get("bytes")
            if num_bytes != job.fetching.num_bytes:
                raise TransferError(f"it sends {num_bytes} bytes, and {job.fetching.num_bytes} were asked for")
            channel.receive_into(job.views, deadline_s)
            if channel.receive(deadline_s).get("whole") is not True:
                raise TransferError("the lease ended while it was read")

    @contextlib.contextmanager
    def _line(self, job: Job) -> Iterator[Channel]:
        """A connection to the job's peer, which `cancel` cuts. It is kept for others if the conversation ended well."""
        peer = job.fetching.peer
        channel = self._lines.take(peer, job.fetching.deadline_s, lambda opened: self._hold(job, opened))
        is_good = False
        try:
            yield channel
            is_good = True
        except RefusedError:
            is_good = True
            raise
        finally:
            with self._lock:
                job.channel = None
            if is_good:
                self._lines.give_back(peer, channel)
            else:
                channel.close()

    def _hold(self, job: Job, channel: Channel) -> None:
        with self._lock:
            job.channel = channel
            if job.is_cancelled:
                channel.cut()

    def _ask(self, channel: Channel, job: Job, ask: str, **further: str) -> Message:
        """Ask for a job's blocks. Raises RefusedError with the peer's sentence."""
        sizes = [view.nbytes for view in job.views]
        message = {"ask": ask, "lease": job.fetching.lease_id, "places": job.remote, "sizes": sizes}
        channel.send(message | further, job.fetching.deadline_s)
        answer = channel.receive(job.fetching.deadline_s)
        if "error" in answer:
            raise RefusedError(str(answer["error"]))
        return answer

    def cancel(self, fetching: Fetching) -> None:
        self._cancel(fetching, CANCELLED)

    def _cancel(self, fetching: Fetching, reason: str) -> None:
        with self._lock:
            job = self._jobs.get(fetching)
            if job is not None:
                job.is_cancelled = True
                if job.channel is not None:
                    job.channel.cut()
        if job is not None:
            self._news.settled(fetching, reason)

    def beat(self, peer: Contact, lease_ids: Sequence[str]) -> None:
        self._couriers.post(peer, alive=lease_ids)

    def release(self, peer: Contact, lease_id: str) -> None:
        self._couriers.post(peer, done=(lease_id,))

    def listen(self, peer: Contact, names: Sequence[str]) -> None:
        self._ears.listen(peer, names)

    def heard(self) -> list[tuple[Contact, str]]:
        return self._ears.take()

    @property
    def bell(self) -> Bell:
        return self._ears.bell

    # Both

    def poll(self) -> list[Note]:
        return self._news.poll()

    def wait(self, timeout_s: float) -> None:
        self._news.wait(timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            self._cancel(job.fetching, CLOSED)
        for job in jobs:
            if job.thread is not None:
                job.thread.join()
        self._couriers.close(LAST_NOTES_S)
        self._audience.close()
        self._ears.close()
        self._lines.close()
        self._listener.close()


TRANSPORT = SocketTransport
