"""What drafts did for the streams of a step, noted as it is applied: how many were computed, how many held, and the
seconds that each stream gained by them against the same tokens one by one."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.core.sequence import Sequence
from twostroke.core.step import Step, StepResult

NEGLIGIBLE_S = 1e-4
"""What finding out takes that nobody wants drafts: in most steps, and not worth a look at every stream."""


def note_drafts(step: Step, result: StepResult, sequences: Mapping[int, Sequence]) -> float:
    """Every stream of the step waits for all of its drafts, so each has its share in what they cost, whose they may
    be. A draft that held spares its own stream a plain step: the seconds of one."""
    if not result.drafted and not step.has_drafts and result.drafting_s < NEGLIGIBLE_S:
        return 0.0
    plain_s, drafts_s = _seconds(step, result)
    for slot in step.decodes:
        timing = sequences[slot.seq_id].timing
        drafted = result.drafted.get(slot.seq_id)
        held = 0
        if drafted is not None:
            held = max(0, len(result.sampled.get(slot.seq_id, ())) - 1)
            timing.draft_steps += 1
            timing.drafts_computed += drafted.num_drafts
            timing.drafts_held += held
        timing.speculation_gain_s += held * plain_s - drafts_s
    return plain_s


def forget_dropped(sequence: Sequence, num_dropped: int, spared_s: float) -> None:
    """Of the drafts that were noted, these held behind the answer's end: they became no tokens, and spared nothing."""
    sequence.timing.drafts_held -= num_dropped
    sequence.timing.speculation_gain_s -= num_dropped * spared_s


def _seconds(step: Step, result: StepResult) -> tuple[float, float]:
    """What its decodes would have taken without drafts, and what the drafts took: making them, as measured, and
    computing them. The prediction is a ratio, and is applied to what was measured; beside a prompt, which the costs
    leave out, it is taken as it is."""
    num_drafts = sum(drafted.num_drafts for drafted in result.drafted.values())
    plain_s, with_drafts_s = step.draft_costs.with_drafts(0), step.draft_costs.with_drafts(num_drafts)
    if plain_s <= 0.0 or with_drafts_s <= 0.0:
        return 0.0, result.drafting_s  # nobody knows what a step costs
    scale = 1.0 if step.prefills else (result.compute_s - result.drafting_s) / with_drafts_s
    return scale * plain_s, scale * (with_drafts_s - plain_s) + result.drafting_s
