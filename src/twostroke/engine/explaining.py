"""What the explain room has to know of an assembled engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.formats import FormatWish
from twostroke.core.speculation import OFF
from twostroke.cost.step_cost import StepCost
from twostroke.cost.trust import doubt_of
from twostroke.engine.formats import kv_needs
from twostroke.explain.explanation import Explainer
from twostroke.explain.facts import EngineFacts

if TYPE_CHECKING:
    from twostroke.engine.build import Assembly


def engine_facts(assembly: Assembly) -> EngineFacts:
    """Asks what the machine allows, which takes a moment the first time."""
    resolved, config = assembly.resolved, assembly.engine.scheduler.config
    target_ms = resolved.sizes.itl_target_ms
    return EngineFacts(
        shape=assembly.shape,
        ceilings=assembly.ceilings(),
        max_running=config.running_limit,
        max_tokens_per_step=config.max_tokens_per_step,
        block_size=resolved.layout.block_size,
        num_blocks=tuple(group.num_blocks for group in resolved.layout.groups),
        kv_bytes=resolved.kv_bytes,
        itl_target_s=None if target_ms is None else target_ms / 1e3,
        draft_methods=tuple(assembly.engine.draft_methods),
        drafts_nothing=_why_no_drafts(assembly),
        int8_kv_share=_int8_kv_share(assembly),
    )


def _why_no_drafts(assembly: Assembly) -> str | None:
    if assembly.engine.draft_methods:
        return None
    if assembly.resolved.config.speculate == OFF:
        return "the engine was started with --speculate off"
    return f"the {assembly.backend_name} backend verifies no drafts yet"


def _int8_kv_share(assembly: Assembly) -> float | None:
    formats = assembly.factory.formats(assembly.checkpoint, FormatWish(kv="int8"))
    if isinstance(formats, str):
        return None
    needs = kv_needs(assembly.factory, assembly.checkpoint, formats)
    share = sum(need.bytes_per_token for need in needs) / assembly.shape.kv_bytes_per_token
    return share if share < 1.0 else None


def trusted_cost(assembly: Assembly) -> StepCost | None:
    """The engine's own, once a calibration or its own steps have proved it."""
    cost: StepCost | None = getattr(assembly.engine, "step_cost", None)
    return cost if doubt_of(cost) is None else None


def explainer_of(assembly: Assembly) -> Explainer:
    def doubt() -> str | None:
        return doubt_of(getattr(assembly.engine, "step_cost", None))

    return Explainer(lambda: engine_facts(assembly), lambda: trusted_cost(assembly), doubt)
