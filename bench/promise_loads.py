"""What `bench/promises.py` plays: the promises, the lengths, and how many requests come when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from bench.promise_players import Way
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.planner.trace import TraceRequest

DERIVED = ServiceLevel("default", is_derived=True)
ON_H200 = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 0.5, 0.03), ServiceLevel("document", 3.0, 0.03), ServiceLevel("bulk", 20.0, 0.06))
)
ON_CPU = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 1.0, 0.15), ServiceLevel("document", 5.0, 0.15), ServiceLevel("bulk", 40.0, 0.3))
)
ON_CPU_LONG = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 2.0, 0.3), ServiceLevel("document", 30.0, 0.3), ServiceLevel("bulk", 120.0, 0.6))
)
FLOODER, QUIET_TENANTS, BURST_EVERY_S = "flood", 8, 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a player is given to do."""

    chats: tuple[int, int]
    """The shortest and the longest prompt."""
    documents: tuple[int, int]
    answers: int
    """The longest; the shortest is a quarter of it."""
    fifo: tuple[Way, ...]
    """Constant chunks to compare with; in the flood the first."""
    rate_seconds: float
    first_rate: float
    num_halvings: int
    flood_seconds: float
    """Of each of the plays."""
    quiet_rate: float
    flood_rate: float
    num_plays: int = 1
    shortened: str = ""
    """Why not chats of 100 to 600 tokens and documents of 3k to 12k."""

    def __str__(self) -> str:
        lengths = "chats of {} to {} tokens, documents of {} to {}".format(*self.chats, *self.documents)
        text = f"{lengths}, answers of {self.answers // 4} to {self.answers}"
        return f"{text} ({self.shortened})" if self.shortened else text

    def quick(self) -> Load:
        return replace(
            self,
            fifo=self.fifo[:2],
            rate_seconds=max(BURST_EVERY_S, self.rate_seconds / 3),
            num_halvings=min(1, self.num_halvings - 1),
            flood_seconds=self.flood_seconds / 4,
            num_plays=1,
        )


H200_LOAD = Load(
    (100, 600),
    (3000, 12_000),
    200,
    fifo=(Way("fifo", 512), Way("fifo", 256), Way("fifo", 1024), Way("fifo", 2048)),
    rate_seconds=120.0,
    first_rate=2.0,
    num_halvings=5,
    flood_seconds=400.0,
    quiet_rate=10.0,
    flood_rate=50.0,
)
CPU_LOAD = Load(
    (25, 150),
    (200, 800),
    32,
    fifo=(Way("fifo", 128), Way("fifo", 64)),
    rate_seconds=25.0,
    first_rate=2.5,
    num_halvings=2,
    flood_seconds=22.0,
    quiet_rate=2.5,
    flood_rate=8.0,
    num_plays=6,
    shortened="shortened for the CPU from 100 to 600, and from 3k to 12k",
)
CPU_LONG_LOAD = Load(
    (100, 600),
    (3000, 7900),
    64,
    fifo=(Way("fifo", 512), Way("fifo", 128)),
    rate_seconds=120.0,
    first_rate=0.25,
    num_halvings=1,
    flood_seconds=120.0,
    quiet_rate=0.3,
    flood_rate=2.0,
    num_plays=2,
    shortened="documents end at SmolLM2's context instead of at 12k",
)


def request(drawn: random.Random, at_s: float, tenant: str, level: str, load: Load) -> TraceRequest:
    lengths = load.documents if level == "document" else load.chats
    if level == "bulk":
        lengths = drawn.choice([load.chats, load.documents])
    num_tokens = drawn.randint(*lengths)
    answer = drawn.randint(load.answers // 4, load.answers)
    return TraceRequest(at_s, num_tokens, answer, tenant=tenant, service_level=level)


def mixed(rate: float, seconds: float, load: Load, *, bursts: bool, seed: int = 1) -> list[TraceRequest]:
    """Seven of ten are chats, one a document, and two come in bursts of the flooding tenant, where there are any."""
    drawn, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + drawn.expovariate(0.8 * rate)) < seconds:
        level = "document" if drawn.random() < 1 / 8 else "chat"
        found.append(request(drawn, at_s, f"quiet-{drawn.randrange(QUIET_TENANTS)}", level, load))
    for burst in range(int(seconds / BURST_EVERY_S) if bursts else 0):
        at_s = (burst + 0.5) * BURST_EVERY_S
        number = max(1, round(0.2 * rate * BURST_EVERY_S))
        found += [request(drawn, at_s, FLOODER, "bulk", load) for _ in range(number)]
    return sorted(found, key=lambda one: one.arrival_s)
