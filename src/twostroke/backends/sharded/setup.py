"""What a rank's process is told as it starts, as one line of JSON: which model, which part of it, in which form, and by
which descriptors it meets the others. No weights travel: each rank reads its own part of the model's files."""

from __future__ import annotations

import json
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from twostroke import backends
from twostroke.backends.host.cores import on_cores
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.interface import (
    Backend,
    BackendFactory,
    BackendSettings,
    CardPlace,
    CardTransport,
    RankedFactory,
)
from twostroke.backends.sharded.lines import Line
from twostroke.backends.sharded.meeting import Meeting, RelayMeeting, SharedMeeting
from twostroke.backends.sharded.rank_cores import rank_cores
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import DrawnTensor, random_checkpoint
from twostroke.models.shard import Shard, shard_checkpoint
from twostroke.models.weights.tensor import WeightKind

Transport = Literal["shared", "relay"] | CardTransport
"""Through shared memory, through rank 0's hands, or between cards, which have their own ways to meet."""
CARD_TRANSPORTS: tuple[CardTransport, ...] = get_args(CardTransport)


@dataclass(frozen=True, slots=True)
class Source:
    """Where every rank finds the model."""

    path: str
    name: str
    drawn_in: str | None = None
    """Of weights that are drawn at random: their kind; None: files hold them."""
    seed: int = 0

    @staticmethod
    def of(checkpoint: Checkpoint) -> Source | None:
        """None: it is in this process alone."""
        path = str(checkpoint.path.absolute())
        if isinstance(checkpoint.tensors, FileTensors):
            return Source(path, checkpoint.name)
        drawn = [tensor for tensor in checkpoint.tensors.values() if isinstance(tensor, DrawnTensor)]
        if len(drawn) < len(checkpoint.tensors):
            return None
        kind = next(one.kind for one in drawn if len(one.shape) == 2 and one.name not in ("embedding", "output"))
        return Source(path, checkpoint.name, kind.name, drawn[0].seed)

    def load(self) -> Checkpoint:
        if self.drawn_in is None:
            return load_checkpoint(Path(self.path), self.name)
        return random_checkpoint(Path(self.path), WeightKind[self.drawn_in], seed=self.seed, name=self.name)


@dataclass(frozen=True, slots=True)
class RankSetup:
    backend: str
    source: Source
    rank: int
    transport: Transport
    widths: tuple[int, ...]
    """Logits that each rank computes of a row."""
    layout: KVLayout
    settings: BackendSettings
    spin_s: float
    ends: tuple[tuple[int, int], ...]
    """Of each line to another rank: whose, and its descriptor."""
    memory: int | None
    """The descriptor of the shared memory, or of the file by which ranks on cards find each other; None: of none."""

    @property
    def place(self) -> CardPlace | None:
        """On a card."""
        if self.transport not in CARD_TRANSPORTS:
            return None
        return CardPlace(self.rank, self.widths, self.transport, f"/proc/self/fd/{self.memory}")

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, len(self.widths))

    def on_own_cores(self) -> AbstractContextManager[None]:
        """Threads that are started within stay on this rank's cores, where there are enough for all ranks. Those of a
        rank on a card go where they like."""
        if self.place is not None:
            return nullcontext()
        return on_cores(rank_cores(self.shard, self.settings.threads))

    def meeting(self) -> Meeting:
        lines = {peer: Line(peer, socket.socket(fileno=end), self.spin_s) for peer, end in self.ends}
        if self.transport != "shared":
            return RelayMeeting(self.rank, lines, self.widths)
        assert self.memory is not None
        return SharedMeeting(self.rank, lines, self.widths, self.memory)

    def to_json(self) -> bytes:
        own = self.settings
        sizes = (own.max_context, own.max_tokens_per_step, own.threads, own.max_running)
        formats = None if own.formats is None else asdict(own.formats)
        told = {name: getattr(self, name) for name in ("backend", "rank", "transport", "widths", "spin_s", "ends")}
        told |= {"source": asdict(self.source), "layout": asdict(self.layout), "sizes": sizes, "formats": formats}
        return json.dumps(told | {"memory": self.memory}).encode() + b"\n"

    @staticmethod
    def from_json(line: bytes) -> RankSetup:
        told: dict[str, Any] = json.loads(line)
        max_context, max_tokens, threads, max_running = told["sizes"]
        formats, groups = told["formats"], told["layout"]["groups"]
        return RankSetup(
            backend=told["backend"],
            source=Source(**told["source"]),
            rank=told["rank"],
            transport=told["transport"],
            widths=tuple(told["widths"]),
            layout=KVLayout(
                told["layout"]["block_size"],
                tuple(KVGroup(**{**group, "layers": tuple(group["layers"])}) for group in groups),
            ),
            settings=BackendSettings(
                max_context=max_context,
                max_tokens_per_step=max_tokens,
                threads=threads,
                max_running=max_running,
                formats=None if formats is None else Formats(**{**formats, "reasons": tuple(formats["reasons"])}),
            ),
            spin_s=told["spin_s"],
            ends=tuple((peer, end) for peer, end in told["ends"]),
            memory=told["memory"],
        )

    def create(self, meeting: Meeting, checkpoint: Checkpoint, factory: BackendFactory | None = None) -> HostBackend:
        """This rank's part of a model, as an ordinary backend that meets the others."""
        own = self._create(checkpoint, factory, replace(self.settings, join=meeting.add_up))
        assert isinstance(own, HostBackend)
        return own

    def create_on_card(self, checkpoint: Checkpoint, factory: BackendFactory | None = None) -> Backend:
        """The same on a card: it meets the others at once, and is there when they are."""
        return self._create(checkpoint, factory, replace(self.settings, place=self.place, drafts=False))

    def _create(self, checkpoint: Checkpoint, factory: BackendFactory | None, settings: BackendSettings) -> Backend:
        factory = factory or backends.load_factory(self.backend)
        assert isinstance(factory, RankedFactory)
        return factory.create(shard_checkpoint(checkpoint, self.shard, factory.rank_unit), self.layout, settings)
