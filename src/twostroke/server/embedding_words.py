"""What the clients of other embedding services say in their own words, of requests that have OpenAI's shape: Cohere's,
Voyage's and NIM's `input_type`, Jina's `task`, and how vectors are to be written. What cannot be done is refused by
name, and never passed over: vectors without their prompt look like any others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.vectors import VectorFacts
from twostroke.server import vectors as v
from twostroke.server.errors import bad_request
from twostroke.server.schemas import EmbeddingBody

_QUERY = ("query", "search_query", "retrieval.query")
_DOCUMENT = ("document", "passage", "search_document", "retrieval.passage")
_FLOATS, _BASE64 = "float", "base64"


@dataclass(frozen=True, slots=True)
class ChosenPrompt:
    name: str | None
    """None: the model's default."""
    is_plain: bool = False
    """None at all, whatever the default is."""
    param: str = "prompt_name"
    """Which field chose it."""

    def is_written(self, facts: VectorFacts) -> bool:
        """Whether it puts anything before a text because the request said so."""
        return self.name is not None and (self.param == "prompt_name" or bool(facts.prompts.get(self.name)))

    def before(self, facts: VectorFacts, texts: Sequence[str]) -> list[str]:
        if self.is_plain:
            return [facts.unprompted(text) for text in texts]
        return v.prompted(facts, texts, self.name)


def chosen_prompt(facts: VectorFacts, body: EmbeddingBody) -> ChosenPrompt:
    named = {"prompt_name": body.prompt_name, "input_type": body.input_type, "task": body.task}
    given = [(param, value) for param, value in named.items() if value is not None]
    if len(given) > 1:
        (first, _), (second, _) = given[:2]
        raise bad_request(f"{first} and {second} both say which prompt is meant: give one of them", second)
    if not given:
        return ChosenPrompt(None)
    ((param, value),) = given
    if param == "prompt_name" or value in facts.prompts:
        return ChosenPrompt(value, param=param)
    if not any(facts.prompts.values()):
        return ChosenPrompt(None, param=param)  # all texts are read alike
    if value in _QUERY and facts.query_prompt is not None:
        return ChosenPrompt(facts.query_prompt, param=param)
    if value in _DOCUMENT:
        own = facts.document_prompt
        return ChosenPrompt(own, is_plain=own is None, param=param)
    raise bad_request(f"{param} is {value[:60]!r}; this model's prompts are: {', '.join(facts.prompts)}", param)


def dimensions_of(body: EmbeddingBody) -> tuple[int | None, str]:
    """And the name of the field that says so."""
    own, theirs = body.dimensions, body.output_dimension
    if own is not None and theirs is not None and own != theirs:
        raise bad_request(f"output_dimension is {theirs}, and dimensions is {own}", "output_dimension")
    return (theirs, "output_dimension") if own is None and theirs is not None else (own, "dimensions")


def writes_base64(body: EmbeddingBody) -> bool:
    """Raises for numbers that are not written here."""
    forms = [] if body.embedding_type is None else body.embedding_type
    for form in [forms] if isinstance(forms, str) else forms:
        if form not in (_FLOATS, _BASE64):
            message = f"embedding_type is {form[:60]!r}; vectors are given as float or base64"
            raise bad_request(message, "embedding_type")
        if isinstance(forms, list) and len(set(forms)) > 1:
            raise bad_request("embedding_type names several forms, and one is given", "embedding_type")
    if body.output_dtype not in (None, _FLOATS):
        raise bad_request(f"output_dtype is {body.output_dtype[:60]!r}; vectors are of float", "output_dtype")
    return body.encoding_format == _BASE64 or (body.encoding_format is None and _BASE64 in forms)


def check_wishes(body: EmbeddingBody) -> None:
    """Jina's, of what no vector here is."""
    if body.normalized is False:
        raise bad_request("normalized is false: vectors are normalised where the model's files say so", "normalized")
    for name in ("late_chunking", "return_multivector"):
        if getattr(body, name):
            raise bad_request(f"{name} is not supported: each text has one vector of its own", name)
