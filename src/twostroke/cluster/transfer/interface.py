"""The contract of a transport: how KV bytes come from one engine's host slots into another's. It knows places and
bytes. It knows no prefix, no request and no clock of a lease: who may read what for how long is decided by its caller.

Who pins what, and until when:

- **The owner** pins the slots of a lease, `offer`s them, and may `withdraw` them at any moment. After `withdraw` it may
  reuse the slots at once: a read is harmless to the owner. Whoever was still reading is cut off and never told that it
  has the whole, so bytes that changed under a read are not used.
- **The reader** pins the slots that a `fetch` fills until the fetch `is_over`. That may be later than `is_settled`,
  when the outcome is known: bytes that were asked for can land after a deadline or a `cancel`.

A transport has threads of its own and calls nobody. The engine's thread calls it, and collects what happened with
`poll`. No call waits for a peer, but for `close`."""

from __future__ import annotations

import enum
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from twostroke.core.errors import BadRequestError

Place = tuple[int, int]
"""A slot of host memory: its KV group, and its number there."""

MOST_ID_CHARACTERS = 128
MOST_CONTACT_CHARACTERS = 1024
_ID = re.compile(r"[A-Za-z0-9._:@/+-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


class Bell(Protocol):
    def fileno(self) -> int: ...


class Slots(Protocol):
    """What a transport reads and fills. `KeptBlocks` (core/kv_blocks.py) is one. A slot's memory stays where it is."""

    def view(self, group: int, slot: int) -> memoryview:
        """A slot's bytes. Asked for on the caller's thread only, in `offer`, `fetch` and at the start."""


class Landing(Protocol):
    """Memory of its own for a peer's blocks, which are no blocks here before they are turned into some."""

    @property
    def views(self) -> Sequence[memoryview]:
        """One a block, as long as the peer's."""

    def land(self, deadline_s: float) -> None:
        """All bytes are there, as they were offered: turn them into blocks. On the transport's thread, before the fetch
        is settled. Raises TimeoutError when it is not done by `deadline_s` of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class Contact:
    """Where an engine's transport is reached. Holds no secret: what opens the door is the fleet's key."""

    transport: str
    host: str
    port: int
    engine_id: str

    def described(self) -> str:
        """As text, which `read` takes."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Contact:
        """Raises BadRequestError, with the field that is wrong."""
        try:
            given = json.loads(text) if len(text) <= MOST_CONTACT_CHARACTERS else None
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise BadRequestError("a contact is a JSON object with transport, host, port and engine_id")
        names = ("transport", "host", "port", "engine_id")
        if set(given) != set(names):
            wrong = ", ".join(sorted(map(str, set(given) ^ set(names)))[:4])[:200]
            raise BadRequestError(f"a contact has transport, host, port and engine_id, and nothing else: see {wrong}")
        transport, host, port, engine_id = (given[name] for name in names)
        if not isinstance(transport, str) or not is_id(transport):
            raise BadRequestError("a contact's transport is a name like nixl or sockets")
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise BadRequestError("a contact's host is a host's name or address")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise BadRequestError("a contact's port is a number from 1 to 65535")
        if not isinstance(engine_id, str) or not is_id(engine_id):
            raise BadRequestError(f"a contact's engine_id has 1 to {MOST_ID_CHARACTERS} letters, digits and ._:@/+-")
        return cls(transport, host, port, engine_id)


def is_id(given: object) -> bool:
    """Whether it may name an engine or a lease."""
    return isinstance(given, str) and _ID.fullmatch(given) is not None


@dataclass(frozen=True)
class TransferConfig:
    """What every transport is made of."""

    engine_id: str
    key: bytes = field(repr=False)
    """The fleet's: whoever has it may read what is on offer, if it knows the lease."""
    host: str = "127.0.0.1"
    """Where to listen, and what peers are told."""
    port: int = 0
    """0: the system chooses."""
    advertised_host: str | None = None
    """What peers are told, where that is not `host`."""

    def __post_init__(self) -> None:
        if not is_id(self.engine_id):
            raise BadRequestError(f"an engine's id has 1 to {MOST_ID_CHARACTERS} letters, digits and ._:@/+-")
        if len(self.key) < 16:
            raise BadRequestError(f"the fleet's key has {len(self.key)} bytes; it needs at least 16")
        if self.advertised_host is None and self.host in ("", "0.0.0.0", "::"):
            raise BadRequestError(
                f"peers cannot reach an engine at {self.host or 'an empty name'!r}: say which address they are told"
            )


class Fetching:
    """One fetch. The transport's threads write it, its owner reads it."""

    def __init__(self, peer: Contact, lease_id: str, num_bytes: int, deadline_s: float) -> None:
        self.peer, self.lease_id, self.num_bytes, self.deadline_s = peer, lease_id, num_bytes, deadline_s
        self.began_s = time.monotonic()
        self.took_s = 0.0
        """Until it was settled."""
        self.arrived = False
        """All bytes are there, as they were offered."""
        self.error: str | None = None
        """Why they are not, a sentence."""
        self.is_settled = False
        """The outcome is known: it arrived, or has an error."""
        self.is_over = False
        """No byte can land in its slots any more. An arrived fetch is over."""
        self._lock = threading.Lock()

    # By the transport alone

    def settle(self, error: str | None) -> bool:
        """The first outcome counts; returns whether this is it."""
        with self._lock:
            if self.is_settled:
                return False
            self.took_s = time.monotonic() - self.began_s
            self.error, self.arrived = error, error is None
            self.is_settled = True
            return True

    def end(self) -> None:
        self.is_over = True


class NoteKind(enum.StrEnum):
    ALIVE = "alive"
    """Owner: a peer still wants this lease."""
    DONE = "done"
    """Owner: a peer has what it wanted, or wants it no more."""
    SETTLED = "settled"
    """Reader: a fetch has its outcome."""
    OVER = "over"
    """Reader: the slots of a fetch may be used for something else. It comes once, with SETTLED or after it."""


@dataclass(frozen=True, slots=True)
class Note:
    kind: NoteKind
    lease_id: str
    fetching: Fetching | None = None
    """Of SETTLED and OVER."""


class Transport(Protocol):
    @property
    def contact(self) -> Contact:
        """What peers need to reach this one."""

    # The owner's side

    def offer(self, lease_id: str, places: Sequence[Place]) -> None:
        """Let peers that have the key and know the lease read these, from now on. A second offer under one id adds to
        the first, as a prompt's blocks become full. The slots' bytes must not change until `withdraw`."""

    def withdraw(self, lease_id: str) -> bool:
        """End an offer. True: the slots may be reused when this returns, whoever reads. It is always so. An unknown id
        is nothing."""

    def is_read(self, lease_id: str) -> bool:
        """Whether a peer is reading it at this moment."""

    def who_listens(self, name: str) -> str | None:
        """Of peers that listen to this engine, the one of this name, by the first of its names; of no name, the only
        one. None: there is none, or there are several."""

    def tell(self, name: str, word: str) -> None:
        """Whoever listens under this name. It may be lost, and never comes twice."""

    # The reader's side

    def fetch(
        self, peer: Contact, lease_id: str, remote: Sequence[Place], local: Sequence[Place] | Landing, deadline_s: float
    ) -> Fetching:
        """Fill local slots with a peer's, each with the one of the same number in the list; or a `Landing`, which turns
        them into blocks. It has its outcome by `deadline_s` of `time.monotonic`. Whatever goes wrong with the peer is
        the Fetching's error, never raised."""

    def cancel(self, fetching: Fetching) -> None:
        """Settle it as cancelled, unless it has its outcome; `is_over` follows."""

    def beat(self, peer: Contact, lease_ids: Sequence[str]) -> None:
        """Tell a peer that these are still wanted. Tried once or twice, then forgotten; never raises."""

    def release(self, peer: Contact, lease_id: str) -> None:
        """Tell a peer that this is not wanted any more, fetched or not. As `beat`: a lease has its own end."""

    def listen(self, peer: Contact, names: Sequence[str]) -> None:
        """Hear what a peer tells one of these names, from now on, until it is gone. Asked for again it is tried
        again."""

    def heard(self) -> list[tuple[Contact, str]]:
        """Words since the last call, and whose they are."""

    @property
    def bell(self) -> Bell:
        """Can be read while `heard` has something."""

    # Both

    def poll(self) -> list[Note]:
        """What happened since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Until `poll` may have something."""

    def close(self) -> None:
        """End all; every fetch is settled and over when this returns."""
