"""How a model's last states become one vector, or the scores of a classifier: which states, and what they then go
through. Knows no file: `sentence_folder.py` reads folders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.core.vectors import VectorFacts
from twostroke.models.spec import StepActivation
from twostroke.models.weights.tensor import WeightTensor

States = Literal["first", "last", "mean", "max", "root_mean", "weighted_mean"]
"""Of the prompt's states, the one that is taken, or what is made of all: their mean, the largest of each number, their
sum by the root of their count, their mean weighted by 1, 2, 3 and so on."""
Wanted = Literal["first", "last", "all"]
"""Whose states a model has to give."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseStep:
    """A matrix that the pooled vector is multiplied by."""

    weight: WeightTensor  # [outputs, inputs]
    bias: WeightTensor | None = None
    activation: StepActivation = "identity"


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    states: States
    facts: VectorFacts
    steps: tuple[DenseStep, ...] = ()
    normalises: bool = False
    """The vector is brought to length 1."""
    others: tuple[States, ...] = ()
    """What the pooled vector goes on with, in this order."""

    @property
    def all_states(self) -> tuple[States, ...]:
        return self.states, *self.others

    @property
    def wanted(self) -> Wanted:
        if self.others:
            return "all"
        return self.states if self.states == "first" or self.states == "last" else "all"

    @property
    def reads_whole(self) -> bool:
        """Whether it needs states of more than the last token: they come from one pass over the whole prompt."""
        return self.wanted != "last"
