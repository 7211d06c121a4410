"""How far predictions of a step's seconds may be gone by. Knows what was measured of them; knows no one who asks."""

from __future__ import annotations

from twostroke.cost.step_cost import StepCost

TRUSTED_AFTER = 20
"""Steps from which on what was measured of a cost says more of it than the calibration that it began with."""
TRUSTED_ERROR = 0.3
"""Costs that are further off explain nothing: floors are the yardstick then."""


def error_of(cost: StepCost | None) -> float | None:
    """By how much its predictions were off on average, as a share of what was measured; None: nothing tells."""
    if cost is None:
        return None
    return cost.calibrated_error if cost.num_observed < TRUSTED_AFTER else cost.error


def at_least_s(predicted_s: float, error: float | None) -> float:
    """What takes as long as predicted takes at least this long, if predictions are too long by their error. Who is
    refused only by this is refused truthfully, as far as is known. 0: nothing is known of them."""
    return 0.0 if error is None else predicted_s / (1.0 + error)


def doubt_of(cost: StepCost | None) -> str | None:
    """Why times should not be explained by its predictions, in words; None: they may."""
    if cost is None:
        return "this engine fits no costs to its steps"
    error = error_of(cost)
    if error is None:
        return "too few steps were measured to fit costs"
    if error > TRUSTED_ERROR:
        whose = "calibrated" if cost.num_observed < TRUSTED_AFTER else "fitted"
        return f"the {whose} costs were off by {error:.0%} on average, too far to go by"
    return None
