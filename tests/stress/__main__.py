"""`python -m tests.stress`: trouble for as long as is asked for, and for a failure what brings it back."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.stress.checker import BrokenRuleError
from tests.stress.playing import Outcome, play
from tests.stress.scenario import scenario_of
from tests.stress.shrinking import shrunk

REAL_SHARE = 0.5
"""Of the time, when both storeys are played."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description="Random trouble for the engine on a virtual clock, then for a real server, while a checker holds "
        "what must never change. A scenario is a function of its seed: a failure prints the command that replays it.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, in all (default: 60)")
    parser.add_argument("--seed", type=int, help="the first scenario's; the next ones follow (default: any)")
    parser.add_argument("--scenarios", type=int, help="so many virtual scenarios, however long they take")
    parser.add_argument("--only", choices=["virtual", "real"], help="one storey alone")
    parser.add_argument("--keep-going", action="store_true", help="count failures, and stop at none")
    chosen = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**9) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    logging.disable(logging.WARNING)  # of full disks, of which there are many
    has_real = chosen.only == "real" or (chosen.only is None and chosen.scenarios is None)
    failed = False
    if chosen.only != "real":
        seconds = chosen.seconds * (1.0 - REAL_SHARE if has_real else 1.0)
        failed = not play_virtual(seed, seconds, chosen.scenarios, keep_going=chosen.keep_going)
    if has_real and (chosen.keep_going or not failed):
        failed |= not play_real(seed, chosen.seconds * (REAL_SHARE if chosen.only is None else 1.0))
    return int(failed)


def play_virtual(seed: int, seconds: float, limit: int | None, *, keep_going: bool) -> bool:
    """`limit`: so many scenarios, in place of the seconds. True: nothing was found."""
    end_s, say_s = time.monotonic() + seconds, time.monotonic() + 30.0
    outcomes: list[Outcome] = []
    number = num_failed = 0
    while number < limit if limit is not None else time.monotonic() < end_s:
        try:
            outcomes.append(play(scenario_of(seed + number)))
        except Exception as error:
            num_failed += 1
            tell(seed + number, error, in_full=not keep_going)
            if not keep_going:
                return False
        number += 1
        if time.monotonic() > say_s:
            print(summary(outcomes, num_failed), flush=True)
            say_s = time.monotonic() + 30.0
    print(summary(outcomes, num_failed), flush=True)
    return not num_failed


def tell(seed: int, error: Exception, *, in_full: bool) -> None:
    print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    if not in_full:
        return
    if not isinstance(error, BrokenRuleError):
        traceback.print_exception(error)
    print("the smallest that fails alike, of what was tried:")
    print(shrunk(scenario_of(seed)))
    print(f"replay: python -m tests.stress --seed {seed} --scenarios 1", flush=True)


def summary(outcomes: list[Outcome], num_failed: int) -> str:
    sums = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTED}
    counted = ", ".join(f"{total:,} {words}" for (_, words), total in zip(COUNTED.items(), sums.values(), strict=True))
    longest = max((outcome.longest_share for outcome in outcomes), default=0.0)
    return f"{len(outcomes):,} scenarios: {counted}; longest wait {longest:.0%} of its limit; {num_failed} failed"


COUNTED = {
    "num_requests": "requests",
    "num_steps": "steps",
    "num_tokens": "tokens, each as expected",
    "num_preemptions": "preemptions",
    "num_tier_tokens": "tokens from other tiers",
}


def play_real(seed: int, seconds: float) -> bool:
    from tests.stress.served import any_options, play_rounds, served

    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), *(options := any_options(Path(folder), seed))) as found,
    ):
        print(" ".join(options), flush=True)
        try:
            play_rounds(found, seed, seconds, lambda text: print(text, flush=True))
        except (BrokenRuleError, AssertionError) as error:
            print(f"{error}\nreplay: python -m tests.stress --only real --seed {seed} --seconds {seconds:.0f}")
            return False
        finally:
            print(", ".join(f"{number} x {name}" for name, number in sorted(found.counts.items())), flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
