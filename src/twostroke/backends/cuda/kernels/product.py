"""A product as kernels and tables describe it: who reads its result, its size, and the card it runs on. A kernel makes
a tile for it, or declines with a reason. Knows no torch, so that planning for a card can ask here, too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Protocol

Role = Literal["plain", "gated", "activated", "join", "sandwich", "head"]
"""Who reads the result. "plain": attention. "gated" and "activated": the MLP's second product, behind a gate or behind
an activation alone. "join": the residual stream, which adds up parts. "sandwich": the same, behind a norm of its own.
"head": sampling, in float32."""
Settings = dict[str, Any]
"""The settings of a tile in a table."""
DEPTH: Final = 64
"""How many inputs a round has: 128 bytes of each row, the most that the copy engine spreads over shared memory's
banks."""
MAX_PART_ROWS: Final = 8 * 256
"""The most parts that a product may leave to its reader, times their rows. The scratch holds this many."""


@dataclass(frozen=True, slots=True)
class Product:
    role: Role
    outputs: int  # of each half, if the role is gated
    width: int
    has_bias: bool = False
    experts: int = 0  # matrices of this size, of which each token meets a few; 0: one matrix, for all tokens
    is_clamped: bool = False
    """Whether its gate is more than an activation (`ClampedGate`)."""

    @property
    def is_gated(self) -> bool:
        return self.role == "gated"

    @property
    def adds_parts(self) -> bool:
        """Whether its reader adds up parts, in float32."""
        return self.role in ("join", "sandwich")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its weights."""
        matrix = (self.outputs * (2 if self.is_gated else 1), self.width)
        return (self.experts, *matrix) if self.experts else matrix


@dataclass(frozen=True, slots=True)
class Card:
    """What kernels ask of a device to decide whether they decline."""

    name: str
    num_sms: int
    has_hopper_kernels: bool
    """Whether it runs Hopper's kernels. That takes the chip, a 16-bit type and a compiler."""
    has_float8: bool = False
    """Whether its tensor cores multiply float8."""
    prefers_float8: bool = False
    """Whether rows of prompts are rounded to float8 if no table says otherwise, because that was asked for."""
    lacks_group_scales: bool = False
    """Whether the library here is too old to multiply float8 with a scale for some inputs of a row."""


class Tile(Protocol):
    """How a kernel cuts a product."""

    @property
    def sums(self) -> int:
        """How many parts of the depth are left in float32 for the reader to add up. 0 means that the result is whole,
        in its type."""


class Kernel(Protocol):
    """A kernel that multiplies. `name` is its name in tables; `form` is how weights must be held for it."""

    name: str
    form: str
    fuses: bool  # whether it also computes the norm before, a bias, and the residual behind

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> Tile | str:
        """Returns the tile, or why this kernel declines."""

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """Returns the settings that are worth measuring."""


def declines(product: Product, card: Card, *, adds_bias: bool = False) -> str | None:
    """Returns why none of Hopper's kernels takes this product. None means that some may."""
    if not card.has_hopper_kernels:
        return "it needs a Hopper GPU, a 16-bit type and CUDA's compiler"
    if product.has_bias and not adds_bias:
        return "it adds no bias"
    if product.is_clamped:
        return "it has no clamped gates"
    if product.width % DEPTH or product.outputs % 8:
        return f"it takes outputs in eights and inputs in multiples of {DEPTH}"
    return None


def settings_of(tile: Any) -> Settings:
    """Returns the settings of a tile that differ from their defaults, as a table has them."""
    return {part.name: value for part in fields(tile) if (value := getattr(tile, part.name)) != part.default}


def padded_rows(rows: int) -> int:
    """Rounds rows up to a multiple of 64, which a warp group multiplies at a time."""
    return -(-rows // 64) * 64


def busy_share(programs: int, num_sms: int) -> float:
    """Returns the share of multiprocessors that are busy, over all waves of programs."""
    return programs / (-(-programs // num_sms) * num_sms)
