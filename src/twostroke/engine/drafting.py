"""Speculation as an engine is built with it: who drafts, on which backend, by whose budget, and a line that says so."""

from __future__ import annotations

from twostroke.backends.interface import (
    Backend,
    CompanionBackend,
    SpeculatingBackend,
    UndraftedBackend,
    UnseenBackend,
)
from twostroke.core.errors import BadRequestError
from twostroke.core.speculation import AUTO, DrafterState
from twostroke.cost.step_cost import StepCost
from twostroke.speculation.budget import DraftBudget
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.grammar import GrammarDrafter
from twostroke.speculation.methods import TEXT_DRAFTERS, methods_of
from twostroke.speculation.speculator import Speculator
from twostroke.speculation.suffix import SuffixDrafter


def speculation(
    asked: str, backend: Backend, step_cost: StepCost, vocab_size: int, *, shares: bool
) -> tuple[DraftBudget | None, str]:
    """What the scheduler asks for drafts, if anybody makes some; and what a user is told. `shares`: requests of a
    tenant and salt may learn from each other, as they share prefixes."""
    methods = methods_of(asked)
    if not methods:
        return None, "speculation off: asked for"
    if not isinstance(backend, SpeculatingBackend) or not backend.max_drafts:
        why = f"the {backend.name} backend verifies no drafts yet"
        if isinstance(backend, UndraftedBackend):
            why = backend.why_no_drafts
        if asked != AUTO:
            raise BadRequestError(f"{why}: leave speculate at {AUTO}")
        return None, f"speculation off: {why}"
    computing = iter(backend.companion_drafters if isinstance(backend, CompanionBackend) else ())
    unseen = backend.unseen if isinstance(backend, UnseenBackend) else None
    on_device = [] if unseen is None else [unseen.name]
    drafters: list[Drafter] = [
        next(computing) if method.computes else _text_drafter(method.name, shares)
        for method in methods
        if method.name not in (GrammarDrafter.name, *on_device)
    ]
    drafters.insert(0, GrammarDrafter())  # whoever else drafts: what a grammar forces is as good as certain
    backend.use_speculator(Speculator(drafters, vocab_size))
    names = [*(drafter.name for drafter in drafters), *on_device]
    why = "forced, or looked up in prompt and answer; computed where they pay" if asked == AUTO else "asked for"
    return DraftBudget(step_cost.seconds, backend.max_drafts, names), f"speculation {' and '.join(names)}: {why}"


def drafter_states(backend: Backend) -> tuple[DrafterState, ...]:
    """How each drafter fares, for whoever operates the engine."""
    return backend.drafter_states() if isinstance(backend, SpeculatingBackend) else ()


def _text_drafter(name: str, shares: bool) -> Drafter:
    return SuffixDrafter(shares=shares) if name == SuffixDrafter.name else TEXT_DRAFTERS[name]()
