"""The interface of backends. A backend executes Steps on one device, in the order they are launched, and keeps a row
for each running Sequence. It declares what it supports, or declines with a reason. It chooses no work: the scheduler
does."""

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
        """Waits for the step, and returns its result. Tickets are awaited in launch order."""


class Backend(Protocol):
    name: str
    max_drafts: int
    """The most drafts that a decode slot may carry. 0 means that it computes one token a slot, and refuses a step with
    drafts."""

    def launch(self, step: Step) -> Ticket:
        """Starts a step, and returns before it is done if the device allows. Steps run in launch order. Only the
        backend knows a row's length, which grows by what the row samples; a slot's `position` is its upper bound."""

    def close(self) -> None:
        """Frees threads and memory. The backend cannot be used afterwards."""


def refuse_drafts(backend: Backend, step: Step) -> None:
    """Raises BackendError if a slot has more drafts than the backend declares. A step that was refused has changed
    nothing."""
    if step.has_drafts:
        most = max(slot.num_queries - 1 for slot in step.decodes)
        if most > backend.max_drafts:
            raise BackendError(
                f"a step has a slot of {most} drafts, and the {backend.name} backend takes {backend.max_drafts}"
            )


@runtime_checkable
class BlockBackend(Protocol):
    """A backend that gives KV blocks out as bytes and takes them in, for tiers behind the device or for another engine.
    Steps may carry spills and loads once `keep_blocks` was called."""

    block_format: KVFormat

    def block_converter(self) -> BlockConverter:
        """Returns what turns blocks of another engine, whose `block_format` differs, into blocks of this one."""

    def read_blocks(self, group: int, block_ids: Sequence[int], into: memoryview) -> None:
        """Copies the bytes of these blocks, one behind the other, as they are when all launched steps are done."""

    def write_blocks(self, group: int, block_ids: Sequence[int], data: memoryview) -> None:
        """Writes these bytes into blocks. Every step that is launched later reads them."""

    def keep_blocks(self, num_slots: Sequence[int]) -> KeptBlocks:
        """Makes room in host memory for this many blocks of each group. Called once, before the first step."""


@runtime_checkable
class MaskingBackend(Protocol):
    """A backend that can keep answers within a grammar. Another backend is never sent such a request."""

    def use_grammars(self, grammars: Grammars) -> None:
        """Called once, before the first step."""


@runtime_checkable
class SpeculatingBackend(Protocol):
    """A backend that asks a Speculator for drafts while it runs a step, when every token is known."""

    def use_speculator(self, speculator: Speculator) -> None:
        """Called once, before the first step."""

    def forget_texts(self) -> None:
        """Drops, before the next step, the texts of ended requests that drafts are made from."""

    def drafter_states(self) -> tuple[DrafterState, ...]:
        """Returns how each drafter fares, for whoever operates the engine."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A model, or a part of one, that drafts for the model that answers, on the same backend."""

    method: str
    """Its drafter's name, one of `speculation.methods.MODEL_DRAFTERS`."""
    checkpoint: Checkpoint
    formats: Formats
    number: int
    """The `KVGroup.model` of its groups in the KV layout, from 1 on."""
    taps: tuple[int, ...] = ()
    """Layers of the model that answers. Its drafter reads the residual stream of every row after each of them."""
    head: Head | None = None
    """The head, if it is one and no whole model. `checkpoint` then has its sizes."""


class Listener(Protocol):
    """An observer of what the model makes of prompts. It is told of every chunk that is read."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers after which it is told the residual stream, in this order."""

    def heard(self, seq_id: int, start: int, states: Sequence[Any]) -> None:
        """Called for a chunk that begins at `start`, with the residual stream behind each layer  # [tokens, hidden]
        each

        They are arrays of the backend's own kind, and the next step overwrites them. On a device they may not be
        computed yet: work that is queued behind them there finds them complete. Called on a thread of the backend."""


def all_taps(companions: tuple[Companion, ...], listener: Listener | None = None) -> tuple[int, ...]:
    """Returns the layers that any of them reads, in order."""
    told = () if listener is None else listener.layers
    return tuple(sorted({*told, *(layer for companion in companions for layer in companion.taps)}))


@runtime_checkable
class CompanionBackend(Protocol):
    """A backend that may be created with companions."""

    companion_drafters: Sequence[Drafter]
    """One drafter for each companion that it was created with, in their order."""


@runtime_checkable
class UndraftedBackend(Protocol):
    """A backend that verifies no drafts, for a reason of its own."""

    why_no_drafts: str


@runtime_checkable
class UnseenBackend(Protocol):
    """A backend that may have a drafter on the device, whose drafts the host does not see."""

    unseen: UnseenDrafts | None


CardTransport = Literal["nccl", "gloo"]
"""How ranks on cards exchange numbers: "nccl" from card to card, "gloo" through the host. With "gloo" several ranks may
share a card."""


class RanksPartedError(Exception):
    """Ranks on cards did not meet, because some rank is gone."""


class Join(Protocol):
    """The place where the ranks of one copy of a model meet. All call it at the same places of a pass, with equally
    many numbers."""

    def __call__(self, values: npt.NDArray[np.float32]) -> None:
        """Puts the sum over all ranks in place of `values`. It is the same to the bit on every rank."""


@dataclass(frozen=True, slots=True)
class CardPlace:
    """Where one of several ranks that compute on cards meets the others."""

    rank: int
    widths: tuple[int, ...]
    """How many logits of a row each rank computes."""
    transport: CardTransport
    store: str
    """A file that all ranks open to find each other."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend is created with, beside the model and the layout of its KV."""

    max_context: int
    max_tokens_per_step: int
    threads: int = 1
    max_running: int = 64
    formats: Formats | None = None
    """The formats that `BackendFactory.formats` gave, with copies for decode if `decode_weights` offered them. None
    means that the backend chooses for itself."""
    companions: tuple[Companion, ...] = ()
    """Given only to a backend whose factory is a CompanionFactory."""
    drafts: bool = True
    """Whether anybody may draft. If not, nothing need be prepared for drafts."""
    join: Join | None = None
    """Given only to a backend whose factory is a RankedFactory, with a checkpoint that is one rank's part. It is called
    with the outputs of attention and of the MLP, before they are added to the residual stream."""
    place: CardPlace | None = None
    """Given only to a backend whose factory is a CardRanksFactory. Its sums are made on devices."""
    listener: Listener | None = None
    """Given only to a backend whose factory is a CompanionFactory, and never together with companions."""


class BackendFactory(Protocol):
    """What a backend's folder registers. It answers cheap questions first; then `create` makes the backend."""

    name: str
    preferred_weights: tuple[str, ...]
    """Formats that it would rather bring float matrices to than hold them as stored: the best first, the smallest
    last."""

    smaller_weights: tuple[str, ...]
    """Formats that it can bring float matrices to if they leave KV too little memory as stored: the largest first."""

    suits: StepSizes
    """The sizes of blocks and steps that it runs best with."""

    def supports(self, checkpoint: Checkpoint) -> str | None:
        """Returns None, or one sentence on why this model cannot run on this backend on this machine."""

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        """Returns the formats that were asked for, with open choices filled in and their reasons; or one sentence on
        what this backend lacks. Copies for decode are not included: see `decode_weights`."""

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], formats: Formats) -> int:
        """Returns the bytes of one token's K and V over these layers. If they keep states, it is the bytes of one
        sequence."""

    def held_bytes(self, checkpoint: Checkpoint, name: str, formats: Formats) -> int:
        """Returns how many bytes of a tensor a step reads, as this backend holds it."""

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        """Returns where weights and KV live, and how much of that memory is left beside the weights and room for such
        steps."""

    def decode_weights(
        self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None
    ) -> DecodeWeights | str | None:
        """Returns the copies of weights that it can hold for decode, or one sentence on why it cannot hold them here.
        None means that it never has any. `on` is a device, known by its data sheet, that need not be here."""

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        """Returns what this machine allows in this model's arithmetic, measured now or remembered from an earlier
        measurement."""

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> Backend:
        """Returns a backend that runs this model. It ignores what it has no use for in `settings`."""


@runtime_checkable
class CompanionFactory(Protocol):
    """A factory whose backends also run models that draft, beside the one that answers. Such a backend offers the
    drafters that it made of them as `CompanionBackend`. In their place it may have a `Listener`."""

    def companion_bytes(self, checkpoint: Checkpoint, formats: Formats) -> int:
        """Returns the bytes of memory that such a model's weights take."""


@runtime_checkable
class RankedFactory(Protocol):
    """A factory whose backend may be one of several ranks that hold a model together (`backends/sharded`)."""

    rank_unit: int
    """Widths of a rank's matrices are multiples of it."""


NO_RANKS = "it does not share one model between several ranks yet"
"""The reason that a factory gives which is no RankedFactory."""


@dataclass(frozen=True, slots=True)
class CardRoom:
    """The memory of one card: what a rank takes of it beside its KV, and which share of the rest KV may take."""

    owner: str
    total_bytes: int
    free_bytes: int
    beside_bytes: int
    kv_share: float


@runtime_checkable
class CardRanksFactory(Protocol):
    """A RankedFactory whose ranks compute on cards. Each rank launches every Step, and knows the rows."""

    def num_cards(self) -> int:
        """Returns how many cards this process may use."""

    def card_room(self, part: Checkpoint, formats: Formats, sizes: StepSizes, card: int) -> CardRoom:
        """Returns the room for a rank's part of a model on a card of this process, which is given by its number."""

    def rank_environment(self, card: int) -> Mapping[str, str]:
        """Returns the environment of a process that is to use this card alone, as its first."""


@runtime_checkable
class RankOnCard(Protocol):
    """A backend that was created with a `CardPlace`. It raises RanksPartedError if a rank that it was to meet is gone,
    as its factory does."""

    def abandon(self) -> None:
        """Called when another rank is gone. Steps in flight end soon, without results. May be called on any thread."""


@runtime_checkable
class SharingFactory(Protocol):
    """The factory of a backend of several ranks that share a model."""

    def described(self, checkpoint: Checkpoint) -> str:
        """Returns what each rank holds, in words for a user."""


@runtime_checkable
class CostedFactory(Protocol):
    """A factory whose backend's steps were measured before, so that an engine's first predictions are good ones."""

    def first_coefficients(self, shape: ModelShape) -> Coefficients: ...


@dataclass(frozen=True, slots=True)
class HeadNeeds:
    """The formats and the memory of a head on a backend."""

    formats: Formats
    weight_bytes: int
    """Bytes of its weights, and of room for what it computes."""
    kv_bytes_per_token: int


@runtime_checkable
class HeadFactory(Protocol):
    """A factory whose backend holds heads in a form of its own. Others hold them in float32."""

    def head_needs(self, head: Head, formats: Formats) -> HeadNeeds | str:
        """Returns what a head takes beside a model in these formats, or one sentence on why this backend cannot run
        it."""


TuningProgress = Callable[[int, int, str], None]
"""Called with the number of products done, the number of all products, and the name of the one that is measured."""


@dataclass(frozen=True, slots=True)
class TunedChange:
    """A product, or attention, that is computed by another kernel or tile from now on."""

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
    """Sentences on what gave wrong results or did not run, and is not used."""
    seconds: float
    kept: Path
    table: str
    """All that is known of the device now, as the text of a file."""


@runtime_checkable
class TunableFactory(Protocol):
    """A factory whose backend's kernels can be measured, so that the fastest are chosen."""

    def tune(self, checkpoint: Checkpoint, formats: Formats, seconds: float, progress: TuningProgress) -> TuningReport:
        """Measures for about `seconds` which kernels compute this model's products fastest here, and keeps the result
        for later engines."""
