"""The experiments, by name, in the order in which a report tells them. One file each."""

from __future__ import annotations

from twostroke.core.errors import BadRequestError
from twostroke.lab.experiments import (
    batch_size,
    chunk_size,
    decode_position,
    kv_cache,
    kv_memory,
    phase_split,
    prefill_length,
    prefix_cache,
    promise,
    roofline,
    saturation,
    speculation,
)
from twostroke.lab.experiments.experiment import Experiment

_MODULES = (
    prefill_length,
    decode_position,
    phase_split,
    batch_size,
    roofline,
    kv_cache,
    kv_memory,
    prefix_cache,
    chunk_size,
    saturation,
    promise,
    speculation,
)
EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}


def choose(text: str | None) -> list[Experiment]:
    """The experiments that were asked for, by names with commas between, in the report's order; None: all."""
    if text is None:
        return list(EXPERIMENTS.values())
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in EXPERIMENTS:
            raise BadRequestError(f"there is no experiment {name!r:.60}; the experiments are: {', '.join(EXPERIMENTS)}")
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names]
