"""Who asks for what and when, as a simulation sees it: arrival times and lengths, drawn (Poisson, bursts) or read from
a JSONL file. Knows no tokens: prompts that share a beginning say so by its name."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twostroke.core.errors import BadRequestError

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 10_000_000
"""Of one prompt or answer: beyond it a slip of the finger."""
MAX_ARRIVAL_S = 1e9


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    """Requests with the same name begin with the same `prefix_tokens` tokens."""
    prefix_tokens: int = 0
    tenant: str = ""
    """Who sent it, by name."""
    service_level: str = ""
    """The class whose promise it is held to, by name; empty: the default."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
                raise BadRequestError(f"{name} must be an integer from 1 to {MAX_TOKENS}, not {value!r:.60}")
        if not is_number(self.arrival_s) or not 0.0 <= self.arrival_s <= MAX_ARRIVAL_S:
            raise BadRequestError(
                f"arrival_s must be seconds from 0 to {MAX_ARRIVAL_S:.0e}, not {self.arrival_s!r:.60}"
            )
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise BadRequestError(f"prefix must be a name, not {self.prefix!r:.60}")
        for name in ("tenant", "service_level"):
            if not isinstance(getattr(self, name), str):
                raise BadRequestError(f"{name} must be a name, not {getattr(self, name)!r:.60}")
        whole = isinstance(self.prefix_tokens, int) and not isinstance(self.prefix_tokens, bool)
        if not whole or not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise BadRequestError(
                f"prefix_tokens must be from 0 to the prompt's length, not {self.prefix_tokens!r:.60}"
            )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens from `least` to `most`, all equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_TOKENS:
            raise BadRequestError(f"lengths must rise from 1 to at most {MAX_TOKENS}, not {self.least} to {self.most}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Of "500", or "200-2000"."""
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", text)
        if match is None:
            raise BadRequestError(f"{text!r:.60} is not a length: write a number of tokens like 500, or 200-2000")
        return cls(int(match.group(1)), int(match.group(2) or match.group(1)))

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.least, self.most)


def poisson(rate_per_s: float, count: int, prompts: Lengths, outputs: Lengths, seed: int = 0) -> list[TraceRequest]:
    """Requests that arrive independently of each other, `rate_per_s` on average."""
    return bursts(rate_per_s, count, prompts, outputs, burst=1, seed=seed)


def bursts(
    rate_per_s: float, count: int, prompts: Lengths, outputs: Lengths, *, burst: int, seed: int = 0
) -> list[TraceRequest]:
    """The same rate, in bunches of `burst` that arrive at once; the bunches arrive independently of each other."""
    if not is_number(rate_per_s) or rate_per_s <= 0.0:
        raise BadRequestError(f"the rate must be requests a second, above 0, not {rate_per_s!r}")
    if not 1 <= count <= MAX_REQUESTS or not 1 <= burst <= count:
        raise BadRequestError(f"a trace has 1 to {MAX_REQUESTS} requests in bursts no larger, not {count} by {burst}")
    generator, now_s, requests = random.Random(seed), 0.0, []
    for number in range(count):
        if number % burst == 0:
            now_s += generator.expovariate(rate_per_s / burst)
        requests.append(TraceRequest(now_s, prompts.draw(generator), outputs.draw(generator)))
    return requests


def read_trace(lines: Iterable[str]) -> list[TraceRequest]:
    """One JSON object a line, with the fields of TraceRequest; in any order of arrival, which is made theirs."""
    requests = sorted(_parse(lines), key=lambda request: request.arrival_s)
    if not requests:
        raise BadRequestError(
            "the trace is empty: one JSON object a line, with arrival_s, prompt_tokens, output_tokens"
        )
    return requests


def _parse(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if number > MAX_REQUESTS:
            raise BadRequestError(f"the trace has more than {MAX_REQUESTS} lines")
        if not line.strip():
            continue
        try:
            yield TraceRequest(**json.loads(line))
        except BadRequestError as error:
            raise BadRequestError(f"line {number} of the trace: {error}") from None
        except (ValueError, TypeError, RecursionError):
            raise BadRequestError(
                f"line {number} of the trace is not an object with arrival_s, prompt_tokens, output_tokens and at most "
                f"prefix, prefix_tokens, tenant and service_level: {line.strip()!r:.80}"
            ) from None
