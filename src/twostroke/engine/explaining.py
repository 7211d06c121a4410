"""What the explain room has to know of an assembled engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import TwostrokeError
from twostroke.cost.step_cost import StepCost
from twostroke.explain.explanation import Explainer
from twostroke.explain.facts import EngineFacts

if TYPE_CHECKING:
    from twostroke.engine.build import Assembly

TRUSTED_AFTER = 20
TRUSTED_ERROR = 0.3
"""A cost that has seen fewer steps, or was further off of late, is no yardstick: floors are then."""


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
        int8_kv_share=_int8_kv_share(assembly),
    )


def _int8_kv_share(assembly: Assembly) -> float | None:
    windows = assembly.checkpoint.spec.kv_windows()
    try:
        sizes = [assembly.factory.kv_bytes_per_token(assembly.checkpoint, layers, "int8") for _, layers in windows]
    except TwostrokeError:
        return None
    share = sum(sizes) / assembly.shape.kv_bytes_per_token
    return share if share < 1.0 else None


def trusted_cost(assembly: Assembly) -> StepCost | None:
    """The engine's own, once it has proved itself."""
    cost: StepCost | None = getattr(assembly.engine, "step_cost", None)
    if cost is None or cost.error is None or cost.num_observed < TRUSTED_AFTER or cost.error > TRUSTED_ERROR:
        return None
    return cost


def explainer_of(assembly: Assembly) -> Explainer:
    return Explainer(lambda: engine_facts(assembly), lambda: trusted_cost(assembly))
