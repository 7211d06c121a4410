"""How users ask for drafters by name, and the classes of those that need nothing but the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.core.errors import BadRequestError
from twostroke.core.speculation import AUTO, OFF
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.grammar import GrammarDrafter
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.suffix import SuffixDrafter

TEXT_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "grammar": GrammarDrafter,
    "suffix": SuffixDrafter,
    "ngram": NgramDrafter,
}
"""Drafters that look tokens up and need no file. They are asked in this order."""
MODEL_DRAFTERS: tuple[str, ...] = ("draft", "eagle3", "medusa")
"""Drafters that compute, from a file that is named behind a colon."""
OWN_DRAFTERS: tuple[str, ...] = ("mtp",)
"""Drafters that compute, from what the model's own files hold."""


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    source: str | None = None
    """The path of its file, as the user gave it."""

    def __str__(self) -> str:
        return self.name if self.source is None else f"{self.name}:{self.source}"

    @property
    def computes(self) -> bool:
        return self.source is not None or self.name in OWN_DRAFTERS


def methods_of(asked: str) -> tuple[Method, ...]:
    """Returns the methods that `--speculate` names: `off`, or names with commas between them, where `auto` stands for
    those that need no file. Raises BadRequestError."""
    if asked == OFF:
        return ()
    found: list[Method] = []
    for part in asked.split(","):
        name, _, source = part.strip().partition(":")
        if name == AUTO and not source:
            found += map(Method, TEXT_DRAFTERS)
        elif name in (*TEXT_DRAFTERS, *OWN_DRAFTERS) and not source:
            found.append(Method(name))
        elif name in MODEL_DRAFTERS and source:
            found.append(Method(name, source))
        else:
            raise BadRequestError(f"speculate must be {known_methods()}, not {asked!r:.80}")
    if len({method.name for method in found}) < len(found):
        raise BadRequestError(f"speculate names a method twice: {asked!r:.80}")
    return tuple(found)


def computing_methods(asked: str) -> list[Method]:
    """Returns the methods that `--speculate` names and that compute."""
    return [method for method in methods_of(asked) if method.computes]


def known_methods() -> str:
    named = [*TEXT_DRAFTERS, *OWN_DRAFTERS, *(f"{name}:FOLDER" for name in MODEL_DRAFTERS)]
    return f"{AUTO}, {OFF}, or {', '.join(named)} (several with commas)"
