"""What a model that gives vectors says of itself, and what is done with a vector: reading, cutting, scoring. Knows
neither weights nor HTTP."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, fsum, sqrt

from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.setting import shown

VECTOR_SAMPLING = SamplingParams(max_tokens=1)
"""The sampling parameters of a request for a vector, which counts as one token."""


@dataclass(frozen=True, slots=True)
class PairFrame:
    """The text that a language model which scores pairs reads around a query and a document."""

    head: str
    """The text that comes first. Control tokens in it count as such; in the texts that follow they are plain
    characters."""
    before_query: str
    """The text before the query. `{instruction}` in it stands for what is to be judged."""
    before_document: str
    tail: str
    """The text that comes last. Control tokens in it count as such, as in `head`."""
    instruction: str = ""
    """The instruction of a request that has none of its own."""

    def opening(self, query: str, instruction: str | None = None) -> str:
        """Returns the text that comes before the document."""
        asked = self.instruction if instruction is None else instruction
        return self.before_query.replace("{instruction}", asked) + query + self.before_document


@dataclass(frozen=True, slots=True)
class VectorFacts:
    dimensions: int
    scores: bool = False
    """True means that it gives no vector but the score of a pair of texts, as a reranker does."""
    is_plain: bool = False
    """True means that its scores are told as they are, and not brought between 0 and 1."""
    frame: PairFrame | None = None
    """The frame of a reranker that is a language model. Others have none."""
    shorter: tuple[int, ...] = ()
    """The lengths that a vector may be cut to, if the model says so. Empty means any length."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts, by name, that are put before a text that is embedded. A query's and a document's often differ."""
    default_prompt: str | None = None
    """The name of the prompt for a request that names none."""
    lowers_case: bool = False
    """True means that texts are made lower case before they are tokenized."""

    def prompted(self, text: str, name: str | None = None) -> str:
        """Returns a text as it is tokenized: behind the prompt of this name, or behind the default prompt."""
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise BadRequestError(f"prompt_name is {shown(name)}; this model's prompts are: {known}")
        chosen = name if name is not None else self.default_prompt
        return self.unprompted(text if chosen is None else self.prompts[chosen] + text)

    def unprompted(self, text: str) -> str:
        """Returns a text as it is tokenized, behind no prompt."""
        return text.lower() if self.lowers_case else text

    @property
    def query_prompt(self) -> str | None:
        """The name of the prompt for a text that is a search query. None means the default."""
        return next((name for name in ("query", "search_query", "retrieval.query") if name in self.prompts), None)

    @property
    def document_prompt(self) -> str | None:
        """The name of the prompt for a text that is searched. None means the default."""
        names = ("document", "passage", "corpus", "search_document", "retrieval.passage")
        return next((name for name in names if name in self.prompts), None)

    def check_instruction(self, instruction: str | None) -> None:
        """Raise BadRequestError if a request has an instruction, and the model reads none."""
        if instruction is not None and (self.frame is None or "{instruction}" not in self.frame.before_query):
            raise BadRequestError("instruction: this model is told none")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise BadRequestError unless vectors may be cut to this length."""
        if dimensions is None:
            return
        most = self.dimensions
        if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= most:
            raise BadRequestError(f"dimensions must be from 1 to this model's {most}, not {shown(dimensions)}")
        if self.shorter and dimensions not in (*self.shorter, most):
            known = ", ".join(map(str, sorted({*self.shorter, most})))
            raise BadRequestError(f"dimensions is {dimensions}; this model was trained for {known}")


def vector_of(raw: bytes, dimensions: int | None = None) -> array[float]:
    """Returns the numbers of an event's vector. If `dimensions` is given, only that many of the first, brought to
    length 1 again."""
    numbers = array("f", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    if dimensions is None or dimensions >= len(numbers):
        return numbers
    return normalised(numbers[:dimensions])


def normalised(numbers: array[float]) -> array[float]:
    """Returns a vector brought to length 1."""
    length = max(_length(numbers), 1e-12)
    return array("f", [number / length for number in numbers])


def score_of(facts: VectorFacts, raw: bytes) -> float:
    """Returns a reranker's score, mostly between 0 and 1: how sure the model is that a document answers a query."""
    (logit,) = vector_of(raw)
    if facts.is_plain:
        return logit
    return 1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    product = fsum(one * other for one, other in zip(first, second, strict=True))
    return product / max(_length(first) * _length(second), 1e-12)


def _length(numbers: Sequence[float]) -> float:
    return sqrt(fsum(number * number for number in numbers))
