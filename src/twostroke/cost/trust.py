"""Whether predictions of a step's seconds may be gone by. Knows what was measured of them; knows no one who asks."""

from __future__ import annotations

from twostroke.cost.step_cost import StepCost

TRUSTED_AFTER = 20
TRUSTED_ERROR = 0.3
"""A cost that was not calibrated and has seen fewer steps, or one that was further off, is no yardstick: floors are
then, and nobody is refused by it."""


def doubt_of(cost: StepCost | None) -> str | None:
    """Why predictions should not come from it, in words; None: they may. Its own steps, once there are enough of them,
    say more of it than the calibration that it began with."""
    if cost is None:
        return "this engine fits no costs to its steps"
    error = cost.calibrated_error if cost.num_observed < TRUSTED_AFTER else cost.error
    if error is None:
        return "too few steps were measured to fit costs"
    if error > TRUSTED_ERROR:
        whose = "calibrated" if cost.num_observed < TRUSTED_AFTER else "fitted"
        return f"the {whose} costs were off by {error:.0%} on average, too far to go by"
    return None
