"""What a program is made of: the parts of its model, and its sizes. Every kind of program takes both."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cpu.arguments import MOST_LACKING_ROWS
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.memory import Floats, float_zeros
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.rotation import Positions
from twostroke.backends.cpu.weights import Weights
from twostroke.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class ModelParts:
    """What all programs of a model share."""

    spec: ModelSpec
    weights: Weights
    kv: KVStore
    positions: Positions
    code: NativeCode


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    max_tokens: int
    max_logits: int
    threads: int = 1
    own_copies: bool = False
    """Each thread prepares the inputs of matrix products for itself: more work in all, and less waiting. It pays for a
    single row."""
    taps: tuple[int, ...] = ()
    """After these layers, every row's residual is copied to a buffer of its own. If the last is among them, all rows go
    on to its end."""
    joins: bool = False
    """The weights are one rank's, and the tape stops where ranks meet."""

    @property
    def rows(self) -> int:
        """Of a buffer of floats: kernels may write some rows behind the last."""
        return self.max_tokens + MOST_LACKING_ROWS

    def floats(self, width: int) -> Floats:
        return float_zeros(self.rows, width)

    def operand(self, width: int) -> Operand:
        """The input of a matrix product that is prepared where it is read."""
        copies = self.threads if self.own_copies else 1
        return Operand(self.max_tokens, width, copies=copies, threads=self.threads)
