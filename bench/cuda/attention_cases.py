"""What the measurements of attention on the card share beside `backends/cuda/attention_cases`: what is said while they
run, and a table of choices in which a failure is one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

STARTED = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}]", *words, flush=True)


@dataclass
class Result:
    name: str
    error: float
    default: float
    best: float
    unit: str
    best_choice: str
    default_us: float
    best_us: float


def try_each(name: str, choices: dict[str, Callable[[], tuple[float, float]]], amount: float, unit: str) -> Result:
    """Each choice gives its error and its seconds, the first being the default's; a failure is one line."""
    found: list[tuple[float, str, float]] = []
    for label, choice in choices.items():
        try:
            error, seconds = choice()
            found.append((seconds, label, error))
            say(f"{name:<22} {label:<44} error {error:.1e} {seconds * 1e6:9.1f} us {amount / seconds:8.2f} {unit}")
            if not error < 2e-2:
                say(f"WRONG: {name} {label}")
        except Exception as fault:
            say(f"FAILED: {name} {label}: {type(fault).__name__} {str(fault)[:160]}".replace("\n", " "))
    if not found:
        return Result(name, float("nan"), 0.0, 0.0, unit, "nothing ran", 0.0, 0.0)
    first = next(iter(choices))
    default = next((entry for entry in found if entry[1] == first), (float("inf"), first, float("nan")))
    best = min(found)
    worst_error = max(error for _, _, error in found)
    return Result(
        name, worst_error, amount / default[0], amount / best[0], unit, best[1], default[0] * 1e6, best[0] * 1e6
    )
