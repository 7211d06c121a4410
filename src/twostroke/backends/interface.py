"""What a backend is: it executes Steps on one device, in the order they are launched, and keeps a row for each running
Sequence. It declares what it supports, or declines with a reason. Chooses no work: that is the scheduler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from twostroke.core.errors import BackendError
from twostroke.core.formats import ANY_FORMATS, Formats, FormatWish
from twostroke.core.grammar import Grammars
from twostroke.core.kv_blocks import BlockConverter, KeptBlocks, KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.speculation import DrafterState
from twostroke.core.step import Step, StepResult
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import DecodeWeights, ModelShape
from twostroke.cost.step_cost import Coefficients
from twostroke.machine import Machine, MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import Head
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.speculator import Speculator
from twostroke.speculation.unseen import UnseenDrafts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Ticket(Protocol):
    """A launched step."""

    @property
    def ready(self) -> bool:
        """Whether `result()` would return at once."""

    def result(self) -> StepResult:
        """Wait for the step. Tickets are awaited in launch order."""


class Backend(Protocol):
    name: str
    max_drafts: int
    """That a decode slot may carry; 0: it computes one token a slot, and refuses a step with drafts."""

    def launch(self, step: Step) -> Ticket:
        """Start a step and return before it is done where the device allows; steps run in launch order. A row's length
        is the backend's to know: it grows by what the row samples, and a slot's `position` is only its bound."""

    def close(self) -> None:
        """Free threads and memory. The backend is of no use after."""


def refuse_drafts(backend: Backend, step: Step) -> None:
    """Raise for more drafts than it declares; a step that was refused has changed nothing."""
    if step.has_drafts:
        most = max(slot.num_queries - 1 for slot in step.decodes)
        if most > backend.max_drafts:
            raise BackendError(
                f"a step has a slot of {most} drafts, and the {backend.name} backend takes {backend.max_drafts}"
            )


@runtime_checkable
class BlockBackend(Protocol):
    """A backend that gives KV blocks out as bytes and takes them in: to tiers behind the device, or to another engine.
    Steps may carry spills and loads once `keep_blocks` was called."""

    block_format: KVFormat

    def block_converter(self) -> BlockConverter:
        """Turns blocks of another engine, whose `block_format` is not equal, into blocks of this one's."""

    def read_blocks(self, group: int, block_ids: Sequence[int], into: memoryview) -> None:
        """The bytes of these blocks, one behind the other, as they are when all launched steps are done."""

    def write_blocks(self, group: int, block_ids: Sequence[int], data: memoryview) -> None:
        """The same the other way: every step that is launched later reads them."""

    def keep_blocks(self, num_slots: Sequence[int]) -> KeptBlocks:
        """Room in host memory for this many blocks of each group. Told once, before the first step."""


@runtime_checkable
class MaskingBackend(Protocol):
    """A backend that can hold answers to a grammar. One that cannot is never sent such a request."""

    def use_grammars(self, grammars: Grammars) -> None:
        """Told once, before the first step."""


@runtime_checkable
class SpeculatingBackend(Protocol):
    """A backend that asks somebody for drafts while it runs a step, where every token is known."""

    def use_speculator(self, speculator: Speculator) -> None:
        """Told once, before the first step."""

    def forget_texts(self) -> None:
        """Drop what drafts are made from of requests that ended, before the next step."""

    def drafter_states(self) -> tuple[DrafterState, ...]:
        """How each drafter fares, for whoever operates the engine."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A model, or a part of one, that drafts for the model that answers, on the same backend."""

    method: str
    """Its drafter's name, of `speculation.methods.MODEL_DRAFTERS`."""
    checkpoint: Checkpoint
    formats: Formats
    number: int
    """Its groups in the layout of KV are those of this `KVGroup.model`, from 1 on."""
    taps: tuple[int, ...] = ()
    """Layers of the model that answers after which its drafter reads the residual stream of every row."""
    head: Head | None = None
    """What it is, if it is no whole model; `checkpoint` then has its sizes."""


class Listener(Protocol):
    """Whoever wants to know what the model makes of prompts: it is told of every chunk that is read."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Behind these it is told the residual stream, in this order."""

    def heard(self, seq_id: int, start: int, states: Sequence[Any]) -> None:
        """Of a chunk from this position on, the residual stream behind each of the layers  # [tokens, hidden] each

        They are arrays of the backend's own kind, and are written over by the next step. On a device they may not be
        computed yet: what is queued behind them there finds them whole. Called on a thread of the backend's."""


def all_taps(companions: tuple[Companion, ...], listener: Listener | None = None) -> tuple[int, ...]:
    """The layers that any of them reads, in order."""
    told = () if listener is None else listener.layers
    return tuple(sorted({*told, *(layer for companion in companions for layer in companion.taps)}))


@runtime_checkable
class CompanionBackend(Protocol):
    """A backend that may be created with companions."""

    companion_drafters: Sequence[Drafter]
    """One for each companion that it was created with, in their order."""


@runtime_checkable
class UndraftedBackend(Protocol):
    """A backend that verifies no drafts, for a reason of its own."""

    why_no_drafts: str


@runtime_checkable
class UnseenBackend(Protocol):
    """A backend that may have a drafter on the device, whose drafts the host does not see."""

    unseen: UnseenDrafts | None


CardTransport = Literal["nccl", "gloo"]
"""By what ranks on cards meet: from card to card, or through the host, by which several may share a card."""


class RanksPartedError(Exception):
    """Ranks on cards did not meet: some rank is gone."""


class Join(Protocol):
    """Where the ranks of one copy meet: all call it at the same places of a pass, with as many numbers."""

    def __call__(self, values: npt.NDArray[np.float32]) -> None:
        """Put the sum over all ranks in their place, the same to the bit on every rank."""


@dataclass(frozen=True, slots=True)
class CardPlace:
    """Of one rank of several that compute on cards: where it meets the others."""

    rank: int
    widths: tuple[int, ...]
    """Logits that each rank computes of a row."""
    transport: CardTransport
    store: str
    """A file that all ranks open, by which they find each other."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend is created with, beside the model and the layout of its KV."""

    max_context: int
    max_tokens_per_step: int
    threads: int = 1
    max_running: int = 64
    formats: Formats | None = None
    """What `BackendFactory.formats` gave, with copies for decode where `decode_weights` offered them; None: what the
    backend chooses of itself."""
    companions: tuple[Companion, ...] = ()
    """Given to a backend whose factory is a CompanionFactory alone."""
    drafts: bool = True
    """Whether anybody may draft: else nothing need be made ready for it."""
    join: Join | None = None
    """Given to a backend whose factory is a RankedFactory alone, with a checkpoint that is one rank's part: what it
    calls with the outputs of attention and of the MLP, before they are added to the residual stream."""
    place: CardPlace | None = None
    """The same of a backend whose factory is a CardRanksFactory: its sums are made on devices."""
    listener: Listener | None = None
    """Given to a backend whose factory is a CompanionFactory alone, and never beside companions."""


class BackendFactory(Protocol):
    """What a backend's folder registers: cheap questions first, then `create`."""

    name: str
    preferred_weights: tuple[str, ...]
    """What it would rather bring float matrices to than hold them as they are stored: the best first, and last what
    takes least."""

    smaller_weights: tuple[str, ...]
    """What it can bring float matrices to where, as they are stored, they leave KV too little memory: the largest
    first."""

    suits: StepSizes
    """What it runs best with."""

    def supports(self, checkpoint: Checkpoint) -> str | None:
        """None, or one sentence on why this model cannot run on this backend on this machine."""

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        """What was asked for, with what was left open filled in and its reasons; or one sentence on what of it this
        backend does not have. Copies for decode are no part of it: see `decode_weights`."""

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], formats: Formats) -> int:
        """Bytes that one token's K and V take over these layers; where they keep states, a sequence's."""

    def held_bytes(self, checkpoint: Checkpoint, name: str, formats: Formats) -> int:
        """Bytes that a step reads of a tensor, as this backend holds it."""

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        """Where weights and KV live, and what the weights, and room for steps of these sizes, leave of it."""

    def decode_weights(
        self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None
    ) -> DecodeWeights | str | None:
        """The copies of weights that it can hold for decode, or one sentence on why it cannot hold them here; None: it
        never has any. `on`: on a device that need not be here, by its data sheet."""

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        """What this machine allows, measured (or remembered from when it was), in this model's arithmetic."""

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> Backend:
        """A backend that runs this model; what it has no use for in `settings` it leaves alone."""


@runtime_checkable
class CompanionFactory(Protocol):
    """A backend that runs models which draft, beside the one that answers. It offers the drafters that it made of them
    as `CompanionBackend`. In their place it may have a `Listener`."""

    def companion_bytes(self, checkpoint: Checkpoint, formats: Formats) -> int:
        """Memory that such a model's weights take."""


@runtime_checkable
class RankedFactory(Protocol):
    """A backend that may be one rank of several, which hold a model together (`backends/sharded`)."""

    rank_unit: int
    """Widths of a rank's matrices are multiples of it."""


NO_RANKS = "it does not share one model between several ranks yet"
"""Why another factory than a RankedFactory declines them."""


@dataclass(frozen=True, slots=True)
class CardRoom:
    """Of one card's memory, what a rank takes of it beside its KV, and what of the rest KV may take."""

    owner: str
    total_bytes: int
    free_bytes: int
    beside_bytes: int
    kv_share: float


@runtime_checkable
class CardRanksFactory(Protocol):
    """A RankedFactory whose ranks compute on cards: each launches every Step, and knows its rows."""

    def num_cards(self) -> int:
        """That this process may use."""

    def card_room(self, part: Checkpoint, formats: Formats, sizes: StepSizes, card: int) -> CardRoom:
        """Of a rank's part on a card of this process, by its number."""

    def rank_environment(self, card: int) -> Mapping[str, str]:
        """What a process is told that is to use this card alone, as its first."""


@runtime_checkable
class RankOnCard(Protocol):
    """A backend that was created with a `CardPlace`. It raises RanksPartedError where a rank that it was to meet is
    gone, as its factory does."""

    def abandon(self) -> None:
        """Another rank is gone: steps in flight end soon, and find nothing. From any thread."""


@runtime_checkable
class SharingFactory(Protocol):
    """A backend of several ranks that share a model."""

    def described(self, checkpoint: Checkpoint) -> str:
        """What each rank holds, for a user to read."""


@runtime_checkable
class CostedFactory(Protocol):
    """A backend whose steps were measured before, so that an engine's first predictions are good ones."""

    def first_coefficients(self, shape: ModelShape) -> Coefficients: ...


@dataclass(frozen=True, slots=True)
class HeadNeeds:
    """What a head takes on a backend."""

    formats: Formats
    weight_bytes: int
    """And of room for what it computes."""
    kv_bytes_per_token: int


@runtime_checkable
class HeadFactory(Protocol):
    """A backend that holds heads in a form of its own; others have them in float32."""

    def head_needs(self, head: Head, formats: Formats) -> HeadNeeds | str:
        """Beside a model in these formats; or one sentence on why it cannot run this head."""


TuningProgress = Callable[[int, int, str], None]
"""Products done, products in all, the one that is measured."""


@dataclass(frozen=True, slots=True)
class TunedChange:
    """A product, or attention, that another kernel, or another tile, computes from now on."""

    product: str
    rows: int
    before: str
    before_us: float
    after: str
    after_us: float


@dataclass(frozen=True, slots=True)
class TuningReport:
    device: str
    num_products: int
    changes: list[TunedChange]
    faults: list[str]
    """What was not right, or did not run, and is not used."""
    seconds: float
    kept: Path
    table: str
    """All that is known of the device now, as a file has it."""


@runtime_checkable
class TunableFactory(Protocol):
    """A backend whose kernels can be measured, and chosen by that."""

    def tune(self, checkpoint: Checkpoint, formats: Formats, seconds: float, progress: TuningProgress) -> TuningReport:
        """Measure what computes this model's products fastest here, for about `seconds`, and keep it for the engines to
        come."""
