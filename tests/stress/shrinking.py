"""Makes a scenario that fails small: leaves out what happens, piece by piece, as long as it still fails alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tests.stress.playing import play
from tests.stress.scenario import Happening, Press, Scenario, Turns

MOST_PLAYS = 400


def why_it_fails(scenario: Scenario) -> str | None:
    """One line; None: it does not."""
    try:
        play(scenario)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def kind_of(failure: str | None) -> str | None:
    """The failure without what differs from one case of it to the next: numbers, and what stands in brackets."""
    return failure and re.sub(r"\W*\d+\W*|\(.*?\)|\[.*?\]", "#", failure)[:60]


def shrunk(scenario: Scenario, fails: Callable[[Scenario], str | None] = why_it_fails) -> Scenario:
    """A smaller scenario of the same kind of failure, after at most `MOST_PLAYS` tries."""
    wanted, plays = kind_of(fails(scenario)), 0
    assert wanted is not None, "it does not fail"
    size = len(scenario.happenings)
    while size and plays < MOST_PLAYS:
        start, was_cut = 0, False
        while start < len(scenario.happenings) and plays < MOST_PLAYS:
            rest = scenario.happenings[:start] + scenario.happenings[start + size :]
            plays += 1
            if kind_of(fails(smaller := replace(scenario, happenings=rest))) == wanted:
                scenario, was_cut = smaller, True
            else:
                start += size
        size = size if was_cut and size == 1 else size // 2
    return _shortened(scenario, fails, wanted)


def _shortened(scenario: Scenario, fails: Callable[[Scenario], str | None], wanted: str) -> Scenario:
    """Fewer turns, where they are many."""
    for place, happening in enumerate(scenario.happenings):
        for shorter in _shorter(happening):
            happenings = (*scenario.happenings[:place], shorter, *scenario.happenings[place + 1 :])
            if kind_of(fails(smaller := replace(scenario, happenings=happenings))) == wanted:
                scenario = smaller
                break
    return scenario


def _shorter(happening: Happening) -> list[Happening]:
    if isinstance(happening, Turns):
        return [Turns(count) for count in (1, happening.count // 2) if count < happening.count]
    if isinstance(happening, Press):
        return [replace(happening, turns=turns) for turns in (5, happening.turns // 4, happening.turns // 2)]
    return []
