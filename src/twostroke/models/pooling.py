"""How a model's last states become one vector, or the scores of a classifier: which states, and what they then go
through. Knows no file: `sentence_folder.py` reads folders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.core.vectors import VectorFacts
from twostroke.models.spec import StepActivation
from twostroke.models.weights.tensor import WeightTensor

States = Literal["first", "last", "mean"]
"""Of the prompt's states, the one that is taken, or the mean of all."""


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

    @property
    def reads_whole(self) -> bool:
        """Whether it needs states of more than the last token: they come from one pass over the whole prompt."""
        return self.states != "last"
