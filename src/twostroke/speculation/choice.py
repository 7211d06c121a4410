"""Which drafts of a step to compute: as many as bring the most expected tokens for each predicted second, over all its
streams together. Knows chances and seconds; knows neither tokens nor drafters."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.step import DraftCosts

LEAST_GAIN = 1.02
"""A step with drafts must promise this many times the tokens a second of one without: a prediction may be off."""


def drafts_that_pay(survivals: Sequence[Sequence[float]], num_slots: int, costs: DraftCosts) -> list[int]:
    """Of each stream's drafts, how many to compute. `survivals`: of each draft, the chance that it holds with all
    before it; it never grows along a stream, so the best drafts of all streams are always beginnings of each. Where
    nothing is known of the costs, all of them."""
    plain_s = costs.with_drafts(0)
    if plain_s <= 0.0:
        return [len(chances) for chances in survivals]
    ranked = sorted(
        ((chance, stream) for stream, chances in enumerate(survivals) for chance in chances),
        key=lambda draft: -draft[0],
    )
    best, best_rate = 0, LEAST_GAIN * num_slots / plain_s
    expected = float(num_slots)
    for count, (chance, _) in enumerate(ranked, start=1):
        expected += chance
        if (rate := expected / costs.with_drafts(count)) > best_rate:
            best, best_rate = count, rate
    counts = [0] * len(survivals)
    for _, stream in ranked[:best]:
        counts[stream] += 1
    return counts
