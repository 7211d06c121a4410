"""Decides which drafts of a step to compute: as many as bring the most expected tokens for each predicted second, over
all its streams together. Knows chances and seconds; knows neither tokens nor drafters."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.step import DraftCosts

LEAST_GAIN = 1.05
"""A step with drafts must promise this many times the tokens a second of one without, since a prediction may be off."""


def drafts_that_pay(survivals: Sequence[Sequence[float]], num_slots: int, costs: DraftCosts) -> list[int]:
    """Returns how many of each stream's drafts to compute. `survivals` has, for each draft, the chance that it holds
    with all before it. It never grows along a stream, so the best drafts of all streams are always the first ones of
    each. If nothing is known of the costs, all drafts are taken."""
    if costs.with_drafts(0) <= 0.0:
        return [len(chances) for chances in survivals]
    ranked = _ranked(survivals)
    counts = [0] * len(survivals)
    for _, stream in ranked[: _best(ranked, num_slots, costs, 0.0)[0]]:
        counts[stream] += 1
    return counts


def drafts_of_one_width(
    survivals: Sequence[Sequence[float]], num_slots: int, costs: DraftCosts, most: Sequence[int]
) -> list[int]:
    """Returns the same for a step in which every slot takes as much time as the slot with the most drafts. That one has
    one of the numbers `most`."""
    if not most:
        return [0] * len(survivals)
    plain_s = costs.with_drafts(0)
    best, rate = max(most) if plain_s <= 0.0 else 0, LEAST_GAIN * num_slots / plain_s if plain_s > 0.0 else 0.0
    for count in most if plain_s > 0.0 else ():
        expected = num_slots + sum(sum(chances[:count]) for chances in survivals)
        if (promised := expected / costs.with_drafts(num_slots * count)) > rate:
            best, rate = count, promised
    return [min(len(chances), best) for chances in survivals]


def best_rate(
    survivals: Sequence[Sequence[float]], num_slots: int, costs: DraftCosts, drafting_s: float = 0.0
) -> float:
    """Returns the expected tokens a second with the drafts that pay, if making them takes `drafting_s`, too."""
    return _best(_ranked(survivals), num_slots, costs, drafting_s)[1]


def _ranked(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Returns the negated chance and the stream of all drafts, the likeliest first."""
    drafts = [(-chance, stream) for stream, chances in enumerate(survivals) for chance in chances]
    drafts.sort()
    return drafts


def _best(ranked: list[tuple[float, int]], num_slots: int, costs: DraftCosts, drafting_s: float) -> tuple[int, float]:
    """Returns how many of the likeliest drafts pay best, and the rate that they promise."""
    best, expected = 0, float(num_slots)
    rate = expected / (costs.with_drafts(0) + drafting_s)
    least = LEAST_GAIN * rate
    for count, (minus_chance, _) in enumerate(ranked, start=1):
        expected -= minus_chance
        promised = expected / (costs.with_drafts(count) + drafting_s)
        if promised > least:
            best, rate, least = count, promised, promised
    return best, rate
