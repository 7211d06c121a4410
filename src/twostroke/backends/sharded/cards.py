"""Another backend's factory, for ranks of it that compute on cards: which card each has, by what they meet, and what
memory KV may take. What all ranks take together is what counts, as on the host; the card with the least room
decides."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, cast

from twostroke.backends.interface import (
    Backend,
    BackendFactory,
    BackendSettings,
    CardRanksFactory,
    CardTransport,
    CostedFactory,
    RanksPartedError,
)
from twostroke.backends.sharded import RANK_MODULE, ShardedFactory
from twostroke.core.errors import BackendError
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.step_cost import Coefficients
from twostroke.machine import Machine, MemorySpace
from twostroke.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from twostroke.backends.sharded.card_backend import CardBackend
    from twostroke.backends.sharded.crew import Crew

NO_COPIES = "ranks on cards hold no copies of weights for decode yet"
BY_GLOO = "through the host: for correctness, not for speed"


class CardsFactory(ShardedFactory):
    rank_module = RANK_MODULE
    """What other ranks' processes run."""

    def __init__(self, own: BackendFactory, size: int, transport: CardTransport | None = None) -> None:
        """`transport`: None: NCCL, where there is a card for each rank."""
        super().__init__(own, size)
        assert isinstance(own, CardRanksFactory)
        self._cards: CardRanksFactory = own
        self._asked: CardTransport | None = transport

    def supports(self, checkpoint: Checkpoint) -> str | None:
        if (reason := self._own.supports(checkpoint)) is not None:
            return reason
        if (reason := self._too_few()) is not None:
            return reason
        return super().supports(checkpoint)

    def _too_few(self) -> str | None:
        cards = self._cards.num_cards()
        if cards >= self._size or self.transport == "gloo":
            return None
        there = f"there is {cards}" if cards == 1 else f"there are {cards}"
        return (
            f"{self._size} ranks need a card each to meet by NCCL, and {there}; --rank-transport gloo has ranks share "
            "a card, which shows that answers are right and is slower than one rank"
        )

    @property
    def transport(self) -> CardTransport:
        return self._asked or "nccl"

    def card_of(self, rank: int) -> int:
        return rank % self._cards.num_cards()

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        """All cards' together. Each has its share of every block, so the one with the least room for its share has the
        say."""
        parts = self.parts(checkpoint)
        rooms = [self._cards.card_room(part, formats, sizes, self.card_of(rank)) for rank, part in enumerate(parts)]
        by_card = {self.card_of(rank): room for rank, room in enumerate(rooms)}
        shares = self._kv_shares(checkpoint, formats)
        free = dict.fromkeys(by_card, 0.0)
        for card, room in by_card.items():
            taken = sum(one.beside_bytes for rank, one in enumerate(rooms) if self.card_of(rank) == card)
            free[card] = max(0, room.free_bytes - taken) / shares[card]
        names = Counter(room.owner for room in by_card.values())
        owner = " and ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
        total = sum(room.total_bytes for room in by_card.values())
        return MemorySpace(owner, total, int(min(free.values())), rooms[0].kv_share)

    def _kv_shares(self, checkpoint: Checkpoint, formats: Formats) -> dict[int, float]:
        """Of all that ranks keep of a block, what lies on each card; of several KV groups, the most of any."""
        shares: dict[int, float] = defaultdict(float)
        for group in checkpoint.spec.kv_groups():
            on_cards = Counter[int]()
            for rank, part in enumerate(self.parts(checkpoint)):
                on_cards[self.card_of(rank)] += self._own.kv_bytes_per_token(part, group.layers, formats)
            for card, num_bytes in on_cards.items():
                shares[card] = max(shares[card], num_bytes / on_cards.total())
        return shares

    def decode_weights(self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None) -> str:
        return NO_COPIES

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        """Of all cards together, each like the first. Their meetings an engine learns from its own steps."""
        one, cards = self._own.ceilings(checkpoint, threads, formats), min(self._size, self._cards.num_cards())
        source = one.source if cards == 1 else f"{cards} times what was {one.source}"
        return Ceilings(one.read_bytes_per_s * cards, one.multiply_adds_per_s * cards, source)

    def first_coefficients(self, shape: ModelShape) -> Coefficients:
        assert isinstance(self._own, CostedFactory)
        return self._own.first_coefficients(shape)

    def described(self, checkpoint: Checkpoint) -> str:
        cards = min(self._size, self._cards.num_cards())
        where = "a card each" if cards == self._size else f"on {cards} card{'s' * (cards > 1)}"
        how = "by NCCL" if self.transport == "nccl" else f"by gloo, {BY_GLOO}"
        return f"{super().described(checkpoint)}; {where}, and they meet {how}"

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> CardBackend:
        from twostroke.backends.sharded.card_backend import CardBackend, RankZero
        from twostroke.backends.sharded.crew import Crew

        if settings.listener is not None:
            raise BackendError("ranks on cards do not tell what they make of prompts yet: leave out --tensor-parallel")
        environments = [self._cards.rank_environment(self.card_of(rank)) for rank in range(self._size)]
        crew = Crew(self._setup(checkpoint, layout, settings, self.transport), environments, self.rank_module)
        try:
            crew.await_here()
            own = self._own_part(crew, checkpoint)
            crew.await_ready()
        except BaseException:
            crew.end(0.0)
            raise
        return CardBackend(cast(RankZero, own), crew)

    def _own_part(self, crew: Crew, checkpoint: Checkpoint) -> Backend:
        try:
            return crew.setup.create_on_card(checkpoint, self._own)
        except RanksPartedError as error:
            raise BackendError(f"{crew.why_lost(f'ranks did not meet ({error})')} as they started") from None
