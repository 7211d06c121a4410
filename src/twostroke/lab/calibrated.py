"""Where the lab's predictions come from: a calibration that was stored, or one taken now, before anything is measured.
Never from the measurements that they stand beside."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.engine.build import Assembly
from twostroke.engine.calibrate import fit, observe_spread
from twostroke.lab.prediction import Prediction


def calibrated_prediction(assembly: Assembly, limit_s: float, say: Callable[[str], None]) -> Prediction:
    """`limit_s`: how long a calibration may take where none is stored; 0: then there are floors only. Call it before
    an adapter watches the engine."""
    ceilings, chunk_tokens = assembly.ceilings(), assembly.engine.scheduler.config.chunk_limit
    calibration, origin = assembly.preparation.calibration(), "stored by twostroke calibrate"
    if calibration is None and limit_s > 0.0:
        say("calibrating the cost model")
        rounds = list(observe_spread(assembly.engine, assembly.checkpoint.spec.vocab_size, limit_s))
        calibration, origin = fit(assembly.shape, ceilings, rounds), "taken before the first experiment"
        assembly.engine.clear_prefixes()
    if calibration is None:
        return Prediction(assembly.shape, ceilings, chunk_tokens)
    cost, host_s = calibration.step_cost(assembly.shape), calibration.host_s
    origin += f": {calibration.num_steps} steps, {calibration.taken}, off by {calibration.error:.1%} on average"
    return Prediction(
        assembly.shape,
        ceilings,
        chunk_tokens,
        lambda work: cost.seconds(work) + host_s,
        newcomer_s=calibration.newcomer_seconds,
        origin=origin,
    )
