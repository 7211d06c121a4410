"""How many replicas like this one its load asks for, by phase, with the sentence why: a pure function of one moment's
signals. A server's advice and the fleet's policy both ask here. Knows no clock and no past: whoever scales decides how
fast to follow, and adds up replicas' loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twostroke.core.service_level import STREAMS_SHARE, most_streams

HORIZON_S = 60.0
"""How far ahead KV is looked at, if nobody says: about as long as another replica takes to be there."""
MOST_BUSY = 0.9
"""The share of its time that an engine may read prompts: above it, waits grow out of proportion."""
FULL = 0.9
"""The share of KV from which on newcomers push others out."""


@dataclass(frozen=True, slots=True)
class LevelSignals:
    """Where one class of requests stands; None: nothing of that kind is promised, or known."""

    name: str
    waiting: int = 0
    running: int = 0
    prefill_backlog_s: float | None = None
    """What reading its prompts should take."""
    ttft_s: float | None = None
    itl_s: float | None = None
    """What is promised."""
    ttft_headroom_s: float | None = None
    """How long before its time the first token of whoever is nearest to being late should come."""
    itl_headroom_s: float | None = None
    """How much longer steps might be and keep the promise."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a decision is made from, and shown with; None: not known, or nothing of the kind."""

    waiting: int = 0
    running_prefill: int = 0
    running_decode: int = 0
    max_running: int | None = None
    prefill_backlog_s: float | None = None
    """What reading all known prompts should take."""
    prefill_busy: float | None = None
    """Of the last minute, the share that went into reading prompts."""
    kv_occupancy: float = 0.0
    kv_full_s: float | None = None
    """Until KV should be full; None: it should not be."""
    stream_step_s: float | None = None
    """Of the last minute, what a step without prompts took."""
    alone_step_s: float | None = None
    """What such a step should take with a single stream."""
    fitting_streams: int | None = None
    """This many streams like these should make a step as long as the shortest promised gap allows."""
    levels: tuple[LevelSignals, ...] = ()
    goodput: dict[str, float] = field(default_factory=dict)
    """By class: requests a second that kept their promise, over the last minute."""
    doubt: str | None = None
    """Why predicted seconds should not be relied on yet."""

    @property
    def num_prompts(self) -> int:
        """That are to be read: more replicas than that would have nothing to do."""
        return self.waiting + self.running_prefill


@dataclass(frozen=True, slots=True)
class Wish:
    replicas: int
    """The load, rounded up, and at least 1."""
    load: float
    """In replicas like this one: add up those of all replicas, then round up."""
    why: str


@dataclass(frozen=True, slots=True)
class Wanted:
    prefill: Wish
    decode: Wish
    both: Wish
    """For replicas that do both: the larger of the two."""


def wanted(signals: Signals, horizon_s: float = HORIZON_S) -> Wanted:
    prefill = _largest(
        [_by_promise, _by_lateness, _by_busyness], signals, "there is nothing to read, and little was of late"
    )
    decode = _largest(
        [lambda given: _by_kv(given, horizon_s), _by_slots, _by_gaps], signals, "no stream runs, and none waits"
    )
    return Wanted(prefill, decode, max(prefill, decode, key=lambda wish: wish.load))


def once_read(signals: Signals, ahead_s: float) -> Signals:
    """The same when another replica could be there: meanwhile this one goes on reading, and gets as much more to read
    as it got in the last minute. What is over by then is nothing to start a replica for."""
    read_s = (1.0 - min(1.0, signals.prefill_busy or 0.0)) * ahead_s
    backlog_s = signals.prefill_backlog_s or 0.0
    left = max(0.0, backlog_s - read_s) / backlog_s if backlog_s > 0.0 else 0.0
    levels = tuple(
        replace(
            level,
            prefill_backlog_s=None if level.prefill_backlog_s is None else left * level.prefill_backlog_s,
            ttft_headroom_s=None,  # whoever is late now has its first token by then
        )
        for level in signals.levels
    )
    return replace(signals, prefill_backlog_s=left * backlog_s, levels=levels)


def _largest(
    reasons: Sequence[Callable[[Signals], tuple[float, str] | None]], signals: Signals, otherwise: str
) -> Wish:
    found = [reason for ask in reasons if (reason := ask(signals)) is not None and reason[0] > 0.0]
    load, why = max(found, key=lambda reason: reason[0], default=(0.0, otherwise))
    return Wish(max(1, math.ceil(round(load, 3))), round(load, 3), why)


# Prefill


def _by_promise(signals: Signals) -> tuple[float, str] | None:
    """A class's newcomer waits for what is read before it: all that is promised as early, or earlier."""
    promised = sorted(
        (level for level in signals.levels if level.ttft_s is not None), key=lambda level: level.ttft_s or 0.0
    )
    backlog_s, found = 0.0, (0.0, "")
    for level in promised:
        backlog_s += level.prefill_backlog_s or 0.0
        target_s = level.ttft_s or math.inf
        load = min(backlog_s / target_s, max(1.0, float(signals.num_prompts)))
        why = (
            f"{seconds_text(backlog_s)} of prompts are to be read that are promised as early as those of {level.name}, "
            f"or earlier, and {level.name} promises a first token in {seconds_text(target_s)}"
        )
        if load > found[0]:
            found = load, why
    return found if found[0] > 0.0 else None


def _by_lateness(signals: Signals) -> tuple[float, str] | None:
    """Whoever will be late is in time where that much less is read before it."""
    missed = [level for level in signals.levels if level.ttft_headroom_s is not None and level.ttft_headroom_s < 0.0]
    if not missed or not signals.prefill_backlog_s:
        return None
    level = min(missed, key=lambda one: one.ttft_headroom_s or 0.0)
    late_s, backlog_s = -(level.ttft_headroom_s or 0.0), signals.prefill_backlog_s
    late, behind = seconds_text(late_s), seconds_text(backlog_s)
    text = f"a first token of {level.name} is expected {late} late, behind {behind} of prompts"
    if backlog_s <= late_s:
        return 1.0, f"{text}: that is more than waits, so further replicas would not bring it in time"
    return min(backlog_s / (backlog_s - late_s), max(1.0, float(signals.num_prompts))), text


def _by_busyness(signals: Signals) -> tuple[float, str] | None:
    if not signals.prefill_busy:
        return None
    return signals.prefill_busy / MOST_BUSY, f"prompts took {signals.prefill_busy:.0%} of the last minute"


# Decode


def _by_kv(signals: Signals, horizon_s: float) -> tuple[float, str] | None:
    """What is held, and what is to come until another replica could help."""
    held = signals.kv_occupancy
    if signals.kv_full_s is None:
        return held / FULL, f"running requests hold {held:.0%} of KV, and it is not filling up"
    ahead = held + (1.0 - held) * horizon_s / max(signals.kv_full_s, 1e-3)
    most = max(1.0, float(signals.running_prefill + signals.running_decode + signals.waiting))
    text = f"running requests hold {held:.0%} of KV, and it should be full in {seconds_text(signals.kv_full_s)}"
    return min(ahead / FULL, most), f"{text}; looked {seconds_text(horizon_s)} ahead"


def _by_slots(signals: Signals) -> tuple[float, str] | None:
    running = signals.running_prefill + signals.running_decode
    if not signals.max_running:
        return None
    if not signals.waiting or running < signals.max_running:
        return running / signals.max_running, f"{running} of {signals.max_running} running slots are taken"
    load = (running + signals.waiting) / signals.max_running
    return load, f"all {signals.max_running} running slots are taken, and {signals.waiting} wait"


def _by_gaps(signals: Signals) -> tuple[float, str] | None:
    """Fewer streams a replica make a step shorter, down to that of a single one. Streams that are written faster end
    sooner, too: with more replicas there are fewer of them in all, and the tokens a second stay. So those are counted,
    as long as steps are short enough; where they are not, all streams have to go somewhere."""
    level = _strictest(signals.levels)
    step_s, alone_s = signals.stream_step_s, signals.alone_step_s
    if level is None or step_s is None or not signals.running_decode:
        return None
    promised_s = level.itl_s or math.inf
    text = f"a step of {signals.running_decode} streams takes {seconds_text(step_s)}"
    promised = f"{level.name} promises gaps of {seconds_text(promised_s)}"
    least_s, most_s = 0.0 if alone_s is None else min(alone_s, step_s), STREAMS_SHARE * promised_s
    if most_s <= least_s:
        return 1.0, f"{text}, and {promised}: a single stream takes {seconds_text(least_s)}, so replicas would not help"
    share = (step_s - least_s) / (most_s - least_s)
    if signals.fitting_streams and step_s <= most_s:  # a line from one stream to these says less than costs do
        share = signals.running_decode / signals.fitting_streams
        text += f" and {signals.fitting_streams} would fit"
    load = share * max(1.0, most_s / max(step_s, 1e-9))
    alone = "" if alone_s is None else f", a single one {seconds_text(least_s)}"
    return min(load, max(1.0, float(signals.running_decode))), f"{text}{alone}, and {promised}"


def _strictest(levels: Sequence[LevelSignals]) -> LevelSignals | None:
    """Of the classes that have streams, the one that promises the shortest gaps."""
    promises = [level for level in levels if level.itl_s is not None and level.running]
    return min(promises, key=lambda one: one.itl_s or 0.0, default=None)


def fitting_streams(levels: Sequence[LevelSignals], most: int, step_s: Callable[[int], float]) -> int | None:
    """`step_s`: what a step of this many streams should take. At most `most`; None: nobody promises gaps."""
    level = _strictest(levels)
    if level is None or level.itl_s is None:
        return None
    return most_streams(level.itl_s, most, step_s)


def seconds_text(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
