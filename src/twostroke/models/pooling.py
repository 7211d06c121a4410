"""How a model's last states become one vector, or the scores of a classifier: which states, and what they then go
through. Knows no file: `sentence_folder.py` reads folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that stand before what is embedded, by name: a query's and a document's often differ."""

    by_name: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    """The name of the one that is taken where a request names none."""


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    states: States
    dimensions: int
    """Of the vector."""
    steps: tuple[DenseStep, ...] = ()
    normalises: bool = False
    """The vector is brought to length 1."""
    scores: bool = False
    """It is no vector but the score of a pair of texts: a reranker's."""
    prompts: Prompts = Prompts()
    lowers_case: bool = False
    """Texts are lowered before they are tokenized."""
    shorter: tuple[int, ...] = ()
    """What a vector may be cut to, where the model says so; none: anything."""

    @property
    def reads_whole(self) -> bool:
        """Whether it needs states of more than the last token: they come from one pass over the whole prompt."""
        return self.states != "last"
