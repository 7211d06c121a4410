"""A product as kernels and tables speak of it: whose result it is, its size, and the card it runs on. A kernel makes a
tile for it, or declines with a reason. Knows no torch: whoever plans for a card asks here too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Protocol

Role = Literal["plain", "gated", "activated", "join", "sandwich", "head"]
"""Who reads the result: attention; the MLP's second product, behind a gate or an activation alone; the residual stream,
which adds up parts; the same behind a norm of its own; sampling, in float32."""
Settings = dict[str, Any]
"""What a table says of a tile."""
DEPTH: Final = 64
"""Inputs a round: 128 bytes of each row, the widest that the copy engine spreads over shared memory's banks."""
MAX_PART_ROWS: Final = 8 * 256
"""Parts that a product may leave to its reader, times their rows: what the scratch holds."""


@dataclass(frozen=True, slots=True)
class Product:
    role: Role
    outputs: int  # of each half, where the role is gated
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
        """Of its weights."""
        matrix = (self.outputs * (2 if self.is_gated else 1), self.width)
        return (self.experts, *matrix) if self.experts else matrix


@dataclass(frozen=True, slots=True)
class Card:
    """A device as kernels decline it."""

    name: str
    num_sms: int
    has_hopper_kernels: bool
    """Whether it runs Hopper's kernels: its chip, the type that is computed in, and a compiler at hand."""
    has_float8: bool = False
    """Whether its tensor cores multiply float8."""
    prefers_float8: bool = False
    """Whether rows of prompts are rounded to float8 where no table says otherwise: it was asked for."""
    lacks_group_scales: bool = False
    """Whether the library here is too old to multiply float8 with a scale for some inputs of a row."""


class Tile(Protocol):
    """How a kernel cuts a product."""

    @property
    def sums(self) -> int:
        """Parts of the depth that are left in float32 for the reader to add up; 0: the result is whole, in its type."""


class Kernel(Protocol):
    """What multiplies. `name` is the table's; `form` is how the weights must be held for it."""

    name: str
    form: str
    fuses: bool  # whether the norm ahead, a bias and the residual behind ride along

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> Tile | str:
        """The tile, or why this kernel declines."""

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """What is worth measuring."""


def declines(product: Product, card: Card, *, adds_bias: bool = False) -> str | None:
    """What all of Hopper's kernels have in common."""
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
    """What a table says of a tile: all that is not as ever."""
    return {part.name: value for part in fields(tile) if (value := getattr(tile, part.name)) != part.default}


def padded_rows(rows: int) -> int:
    """A warp group multiplies 64 rows at a time."""
    return -(-rows // 64) * 64


def busy_share(programs: int, num_sms: int) -> float:
    """Of the multiprocessors, over all waves of programs."""
    return programs / (-(-programs // num_sms) * num_sms)
