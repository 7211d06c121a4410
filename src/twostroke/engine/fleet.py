"""From what an engine of a fleet is told to the peers of its tiers: where its KV may be taken, and what its bytes
mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from twostroke.backends.interface import BlockBackend
from twostroke.cluster.transfer import announcements, open_transport
from twostroke.cluster.transfer.interface import Contact, Transport
from twostroke.config import ResolvedConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import Announcement
from twostroke.core.service_level import ServiceLevels
from twostroke.cost.step_cost import StepCost
from twostroke.kv.tiers.landing import Landing
from twostroke.kv.tiers.peers import Peers
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.transport import Fetching, Place
from twostroke.scheduling.staying import Staying

HOST_GB = 1.0
"""Of host memory for KV on its way, where none was asked for."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What an engine needs to know of its fleet."""

    key: str = field(repr=False)
    """In hexadecimal: who has it may read and write the KV that is on its way."""
    transport: str = "auto"
    host: str = "127.0.0.1"
    """Where its KV may be taken: an address of this machine."""
    engine_id: str = ""
    leaves_prompts: bool = False
    """Whether a prompt that is to be read for another engine is left to it where that is sooner."""
    names: tuple[str, ...] = ()
    """What routers call this engine's server, HOST:PORT."""


def staying_of(fleet: FleetSettings | None, resolved: ResolvedConfig, step_cost: StepCost) -> Staying | None:
    """By what prompts are left to the engines that write; None: none is."""
    if fleet is None or not fleet.leaves_prompts:
        return None
    sizes, levels = resolved.sizes, resolved.config.promised() or ServiceLevels()
    itl_target_s = None if sizes.itl_target_ms is None else sizes.itl_target_ms / 1e3
    return Staying(step_cost.seconds, sizes.max_tokens_per_step, sizes.block_size, levels, itl_target_s)


class _Named:
    """A transport whose peers are called by the text of their contact, as handoffs carry it, and whose announcements
    are signed."""

    def __init__(self, transport: Transport, key: bytes, names: Sequence[str]) -> None:
        """`names`: that peers may call this engine."""
        self._transport, self._key, self._names = transport, key, tuple(names)
        self.described, self.bell = transport.contact.described(), transport.bell
        self.who_listens = transport.who_listens
        self.offer, self.withdraw, self.cancel = transport.offer, transport.withdraw, transport.cancel
        self.is_read = transport.is_read
        self.poll, self.wait, self.close = transport.poll, transport.wait, transport.close

    def name_of(self, peer: str) -> str:
        return Contact.read(peer).engine_id

    def fetch(
        self, peer: str, lease_id: str, remote: Sequence[Place], local: Sequence[Place] | Landing, deadline_s: float
    ) -> Fetching:
        return self._transport.fetch(Contact.read(peer), lease_id, remote, local, deadline_s)

    def announce(self, listener: str, announcement: Announcement) -> None:
        self._transport.tell(listener, announcements.signed(self._key, listener, announcement))

    def listen(self, peer: str) -> None:
        self._transport.listen(Contact.read(peer), self._names)

    def announced(self) -> Iterator[Announcement | None]:
        for peer, word in self._transport.heard():
            try:
                yield announcements.opened(self._key, word, peer.described(), self._names)
            except BadRequestError:
                yield None

    def beat(self, peer: str, lease_ids: Sequence[str]) -> None:
        self._transport.beat(Contact.read(peer), lease_ids)

    def release(self, peer: str, lease_id: str) -> None:
        self._transport.release(Contact.read(peer), lease_id)


def make_peers(fleet: FleetSettings, tiers: KVTiers, backend: BlockBackend, model: str) -> str:
    """Join the fleet; returns a sentence on how. `model`: what must be the same for KV to be another's own."""
    places = [(group, slot) for group, count in enumerate(tiers.host.num_slots) for slot in range(count)]
    key = bytes.fromhex(fleet.key)
    transport, why = open_transport(
        fleet.transport, tiers.blocks, places, key, host=fleet.host, engine_id=fleet.engine_id
    )
    contact = transport.contact
    named = _Named(transport, key, (contact.engine_id, *fleet.names))
    tiers.peers = Peers(tiers.host, tiers.blocks, named, model, backend.block_format, backend.block_converter())
    return f"fleet: KV goes by {why}, from {contact.host}:{contact.port}"
