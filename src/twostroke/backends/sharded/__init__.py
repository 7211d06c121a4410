"""Tensor parallelism: a backend of several ranks, each of which is an ordinary backend with a part of the model
(`models/shard.py`). On the host start at `backend.py`; `meeting.py` is where its ranks meet. On cards start at
`card_backend.py`; where those meet their own backend knows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.backends.interface import (
    NO_RANKS,
    Backend,
    BackendFactory,
    BackendSettings,
    CardRanksFactory,
    CardTransport,
    RankedFactory,
)
from twostroke.core.errors import ModelError
from twostroke.core.formats import ANY_FORMATS, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.machine import Machine, MemorySpace, available_threads
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.shard import Shard, described, shard_checkpoint

if TYPE_CHECKING:
    from twostroke.backends.sharded.setup import RankSetup, Transport


RANK_MODULE = "twostroke.backends.sharded.rank_process"
"""What the processes of ranks above 0 run."""
ON_HOSTS = "its ranks meet in shared memory, and --rank-transport is for ranks on cards"


def shared_by(own: BackendFactory, size: int, transport: CardTransport | None) -> ShardedFactory:
    """`transport`: between cards; None: as suits them."""
    from twostroke.backends.sharded.cards import CardsFactory

    if isinstance(own, CardRanksFactory):
        return CardsFactory(own, size, transport)
    return ShardedFactory(own, size, declines=None if transport is None else ON_HOSTS)


class ShardedFactory:
    """Another backend's factory, for ranks of it that share this machine's memory: what all of them take together is
    what counts."""

    def __init__(
        self, own: BackendFactory, size: int, transport: Transport = "shared", declines: str | None = None
    ) -> None:
        """`declines`: why it does not do what was asked for."""
        self._declines = declines
        self._own, self._size, self._transport = own, size, transport
        self.name = own.name
        self.preferred_weights, self.smaller_weights = own.preferred_weights, own.smaller_weights
        self.suits = own.suits
        self._known: tuple[Checkpoint, list[Checkpoint]] | None = None

    def supports(self, checkpoint: Checkpoint) -> str | None:
        from twostroke.backends.sharded.setup import Source

        if (reason := self._own.supports(checkpoint)) is not None:
            return reason
        if self._declines is not None:
            return self._declines
        if not isinstance(self._own, RankedFactory):
            return NO_RANKS
        if Source.of(checkpoint) is None:
            return "its ranks read a model's files themselves, and this model is in memory alone"
        try:
            parts = self.parts(checkpoint)
        except ModelError as error:
            return str(error)
        for rank, part in enumerate(parts):
            if (reason := self._own.supports(part)) is not None:
                return f"rank {rank} of {self._size} would have a part that it cannot run: {reason}"
        return None

    def parts(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Each rank's. Raises ModelError where there are none."""
        assert isinstance(self._own, RankedFactory)
        if self._known is None or self._known[0] is not checkpoint:
            unit, shards = self._own.rank_unit, (Shard(rank, self._size) for rank in range(self._size))
            self._known = checkpoint, [shard_checkpoint(checkpoint, shard, unit) for shard in shards]
        return self._known[1]

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        return self._own.formats(checkpoint, wish)

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], formats: Formats) -> int:
        """Of all ranks: more than of one where they hold the same heads, or latents."""
        return sum(self._own.kv_bytes_per_token(part, layers, formats) for part in self.parts(checkpoint))

    def held_bytes(self, checkpoint: Checkpoint, name: str, formats: Formats) -> int:
        """Of all ranks: what each has for itself is read by each."""
        if name == "embedding":
            if not checkpoint.spec.tied_embeddings:
                return self._own.held_bytes(checkpoint, name, formats)
            name = "output"
        parts = (part for part in self.parts(checkpoint) if name in part.tensors)
        return sum(self._own.held_bytes(part, name, formats) for part in parts)

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        """All ranks' weights lie in it, and what one process would hold counts already."""
        space, own = self._own.memory(checkpoint, here, formats, sizes), self._own
        whole = sum(own.held_bytes(checkpoint, name, formats) for name in checkpoint.tensors)
        held = sum(own.held_bytes(part, name, formats) for part in self.parts(checkpoint) for name in part.tensors)
        return replace(space, free_beside_weights_bytes=max(0, space.free_beside_weights_bytes + whole - held))

    def decode_weights(self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None) -> str | None:
        """Both phases read the same."""
        return None

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        """Of the machine: all its cores, whichever rank has them."""
        return self._own.ceilings(checkpoint, threads, formats)

    def described(self, checkpoint: Checkpoint) -> str:
        """What each rank holds, for a user to read."""
        return described([part.spec for part in self.parts(checkpoint)])

    def _setup(
        self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings, transport: Transport
    ) -> RankSetup:
        """Rank 0's, without descriptors."""
        from twostroke.backends.sharded.lines import SPIN_S
        from twostroke.backends.sharded.setup import RankSetup, Source

        source, threads = Source.of(checkpoint), max(1, settings.threads // self._size)
        assert source is not None and not settings.companions
        return RankSetup(
            backend=self.name,
            source=source,
            rank=0,
            transport=transport,
            widths=tuple(part.spec.num_logits for part in self.parts(checkpoint)),
            layout=layout,
            settings=replace(settings, threads=threads),
            spin_s=SPIN_S if threads * self._size <= available_threads() else 0.0,
            ends=(),
            memory=None,
        )

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> Backend:
        from twostroke.backends.sharded.backend import ShardedBackend
        from twostroke.backends.sharded.crew import Crew

        crew = Crew(self._setup(checkpoint, layout, settings, self._transport))
        try:
            with crew.setup.on_own_cores():
                own = crew.setup.create(crew.meeting, checkpoint, self._own)
            crew.await_ready()
        except BaseException:
            crew.end(0.0)
            raise
        return ShardedBackend(own, crew, settings.max_context, checkpoint.spec.vocab_size)
