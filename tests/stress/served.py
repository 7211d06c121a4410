"""The second storey: `twostroke serve` with little KV and a short queue, and rounds of clients while its engine is
killed, frozen, or left alone. After each round the server is healthy, holds nothing, and answers as it did when it was
quiet. The seed replays who asks what; when it happens is the machine's."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tests.server.running import RunningServer, running_server
from tests.stress.checker import BrokenRuleError
from tests.stress.clients import QUESTIONS, Answer, Day, answer_in, crowd

ENGINE_TIMEOUT_S = 4.0
PATIENCE_S = 60.0
"""That a round waits for its first answers."""
OPTIONS = (
    *("smollm2", "--backend", "cpu", "--max-context", "256", "--kv-memory", "12MB"),
    *("--max-running", "6", "--max-queue", "12", "--engine-timeout", str(ENGINE_TIMEOUT_S)),
)
"""Less KV than six of the longest questions need: streams are preempted, prefixes evicted, and the queue runs over."""


class Disaster(Enum):
    NONE = "nothing"
    KILL = "the engine is killed"
    FREEZE = "the engine is stopped until the server ends it"
    PAUSE = "the engine is stopped for a second, and goes on"

    @property
    def ends_the_engine(self) -> bool:
        return self in (Disaster.KILL, Disaster.FREEZE)


@dataclass
class Served:
    server: RunningServer
    num_blocks: float
    expected: dict[int, Answer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    restarts: int = 0

    def learn(self) -> None:
        """Ask everything, one at a time."""
        self.expected = {number: self._ask(number) for number in range(len(QUESTIONS))}

    def _ask(self, number: int) -> Answer:
        response = self.server.post("/v1/completions", QUESTIONS[number])
        if response.status_code != 200:
            raise BrokenRuleError(f"a quiet server says {response.status_code}: {response.text[:300]}")
        return answer_in(response.json()["choices"])

    def round(self, seed: str, seconds: float, num_clients: int, disaster: Disaster) -> None:
        """At least so many seconds, and until a few answers came and the disaster behind them."""
        day = Day(self.server.address, self.expected, may_fail=disaster.ends_the_engine)
        source = random.Random(seed)
        end_s, answers = time.monotonic() + seconds, source.randint(2, num_clients)
        has_struck = threading.Event()

        def strike() -> None:
            while day.counts["answers"] < answers and time.monotonic() < end_s + PATIENCE_S:
                time.sleep(0.01)
            self._strike(disaster)
            has_struck.set()

        def is_over() -> bool:
            return has_struck.is_set() and time.monotonic() > end_s

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            asyncio.run(crowd(day, is_over, num_clients, seed, source.choice([0.0, 0.05])))
        except* BrokenRuleError as broken:
            raise broken.exceptions[0] from None
        finally:
            end_s = -PATIENCE_S
            striking.join()
        self.restarts += disaster.ends_the_engine
        self.counts += day.counts
        if not day.counts["answers"]:
            raise BrokenRuleError(f"nobody was answered: {day.counts}")
        self.look(source)

    def _strike(self, disaster: Disaster) -> None:
        if disaster is Disaster.NONE:
            return
        engine = self.server.engine_pid()
        os.kill(engine, signal.SIGKILL if disaster is Disaster.KILL else signal.SIGSTOP)
        if disaster is Disaster.PAUSE:
            time.sleep(1.0)
            os.kill(engine, signal.SIGCONT)

    def look(self, source: random.Random) -> None:
        """The server is as it was."""
        server = self.server
        server.wait_until(lambda: server.get("/health").status_code == 200)
        server.wait_until_idle()
        # A new engine is well before it has told of its blocks.
        server.wait_until(lambda: server.metric("twostroke_kv_blocks") == self.num_blocks)
        if (restarts := server.metric("twostroke_engine_restarts_total")) != self.restarts:
            raise BrokenRuleError(f"{restarts:.0f} engines were started anew, and {self.restarts} were ended")
        for number in source.sample(range(len(QUESTIONS)), 3):
            if (answer := self._ask(number)) != self.expected[number]:
                raise BrokenRuleError(f"question {number} is now answered {answer}, not {self.expected[number]}")
        if "Traceback" in server.log():
            raise BrokenRuleError(f"the server's log shows a fault:\n{server.log()[-3000:]}")


LEVELS = {
    "queue": "[levels.default]\nttft_ms = 200\nitl_ms = 25\n",
    "refuse": '[levels.default]\nttft_ms = 1000\nitl_ms = 1000\nwhen_late = "refuse"\n',
}
"""Nobody names a class: what the default promises is promised to all. Gaps that a few streams fill, so that others wait
for them; or a first token that comes in time on any machine where nobody is before it, and else is refused."""


def any_options(folder: Path, seed: int) -> tuple[str, ...]:
    """A policy, promises with two of three seeds, and with every other seed tiers of KV: a killed engine's successor
    finds what it left on disk."""
    source = random.Random(seed)
    policy: tuple[str, ...] = ("--policy", source.choice(["fifo", "slack", "fair"]))
    if (levels := LEVELS.get(source.choice(["none", *LEVELS]))) is not None:
        (folder / "levels.toml").write_text(levels)
        policy += ("--service-levels", str(folder / "levels.toml"))
    tiers = ("--kv-host-gb", "0.02", "--kv-disk", str(folder / "kv"), "--kv-disk-gb", "0.1")
    return policy + tiers if seed % 2 else policy


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    with running_server(folder / "log", *OPTIONS, *options) as server:
        server.wait_until(lambda: server.metric("twostroke_kv_blocks") > 0)
        found = Served(server, server.metric("twostroke_kv_blocks"))
        found.learn()
        yield found


def play_rounds(found: Served, seed: int, seconds: float, say: Callable[[str], None]) -> None:
    """Until the time is over, at least one round."""
    end_s, number = time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < end_s:
        source = random.Random(f"{seed}:{number}")
        disaster = source.choice(list(Disaster))
        num_clients, lasts_s = source.choice([2, 8, 24, 64]), source.choice([1.0, 3.0, 10.0])
        say(f"round {number}: {num_clients} clients for {lasts_s:.0f} s, {disaster.value}")
        found.round(f"{seed}:{number}", lasts_s, num_clients, disaster)
        number += 1
