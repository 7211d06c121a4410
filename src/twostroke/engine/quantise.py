"""What float weights are brought to as they are loaded, and why. Weights that are stored quantised are never touched:
quantising twice would add an error for nothing."""

from __future__ import annotations

from dataclasses import replace

from twostroke.machine import Machine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind

KINDS = {"q8_0": WeightKind.Q8_0, "q4_1": WeightKind.Q4_1, "none": None}
SHARE_OF_MEMORY = 0.6
"""Of what is free: weights beyond it leave too little for KV and the rest of the machine."""


def as_asked(asked: str | None, checkpoint: Checkpoint) -> tuple[Checkpoint, str | None]:
    """The checkpoint with what the user asked for, and the reason to tell; before a backend is chosen, so that one
    which cannot do it is passed over."""
    if asked is None:
        return checkpoint, None
    if not checkpoint.has_float_matrices:
        return checkpoint, f"quantise {asked}: changes nothing, the weights are stored quantised"
    return replace(checkpoint, quantise_to=KINDS[asked]), f"quantise {asked}: asked for"


def by_default(checkpoint: Checkpoint, machine: Machine) -> tuple[Checkpoint, str | None]:
    """For a backend that quantises as it loads. On a CPU decode is as fast as weights are read, and prefill multiplies
    8-bit integers several times faster than floats; Q8_0 keeps SmolLM2's perplexity within 1% of its float weights'.
    So it is the default, and Q4_1, which costs quality, only where Q8_0 does not fit."""
    if not checkpoint.has_float_matrices:
        return checkpoint, None
    small = replace(checkpoint, quantise_to=WeightKind.Q8_0)
    if small.held_bytes <= SHARE_OF_MEMORY * machine.available_memory_bytes:
        sizes = f"{small.held_bytes / 1e6:.0f} MB to read for a token instead of {checkpoint.held_bytes / 1e6:.0f}"
        return small, f"quantise q8_0: {sizes}, and 8-bit arithmetic; --quantise none keeps floats"
    smaller = replace(checkpoint, quantise_to=WeightKind.Q4_1)
    share = f"{SHARE_OF_MEMORY:.0%} of the free memory"
    return smaller, f"quantise q4_1: at q8_0 the weights would take more than {share}; --quantise q8_0 takes it"
