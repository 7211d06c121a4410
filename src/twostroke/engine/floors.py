"""What the hardware would have allowed for one finished sample: its two floors, from the cost room's physics and this
machine's measured ceilings."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import decode_run_floor_s, prefill_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class PhaseFloors:
    prefill_s: float
    """To read the tokens that were not cached, on an idle machine."""
    decode_s: float
    """To write every token after the first that is drawn here, alone, at its own context length, in as many steps as it
    took."""


def phase_floors(shape: ModelShape, ceilings: Ceilings, timing: SequenceTiming) -> PhaseFloors:
    computed = timing.prompt_tokens - timing.cached_tokens
    num_decoded, num_steps = timing.num_decoded, max(0, timing.decode_steps - timing.first_came)
    return PhaseFloors(
        prefill_s=prefill_floor_s(shape, timing.cached_tokens, computed, ceilings),
        decode_s=decode_run_floor_s(shape, timing.prompt_tokens + 1, num_decoded, ceilings, num_steps),
    )
