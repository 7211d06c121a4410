"""What watching costs: tokens a second of concurrent streams with nobody, one page and ten pages at `/watch`, in short
turns on one server. Nobody takes part twice: how far its two halves lie apart is the noise. Viewers read a few times a
second what their system has kept, so what is measured is the engine and the server. `python -m bench.watching`."""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench.paced_engine import LAUNCHED, PACE
from bench.server_overhead import PAUSE_S, cpu_s, prompts, server_rates, serving

FORGETFUL = "from twostroke.server import watch_hub; watch_hub.LINGER_S = 0.0; from twostroke.cli import main; main()"
"""The server as it is, but the engine stops telling its steps as soon as nobody watches. Else each turn with nobody
would have to wait 20 s for that, and there would be few turns."""
OPTIONS = ["serve", "--no-prefix-caching"]
"""All sides of a round play the same prompts, which each has to read: how often drafts hold may depend on the
prompt, and is then the same for all."""
READ_EVERY_S = 0.2
LOOK_EVERY_S = 0.01
GONE_WITHIN_S = 5.0
KEPT_BYTES = 4 << 20
STEP = b'"t":"step"'


class Viewers:
    """So many streams of steps, read and thrown away."""

    def __init__(self, address: str, number: int) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._connections = [_begin_watching(address) for _ in range(number)]
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Viewers:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()

    def _read(self) -> None:
        while not self._is_over.wait(READ_EVERY_S):
            for connection in self._connections:
                try:
                    self.num_bytes += len(connection.recv(KEPT_BYTES))
                except BlockingIOError:
                    continue


def _begin_watching(address: str) -> socket.socket:
    """It finds no step of before: the engine told none to nobody."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_BYTES)
    connection.sendall(f"GET /watch HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    seen = b""
    while b'"t":"state"' not in seen:  # the last word of what a viewer is told first
        if not (piece := connection.recv(KEPT_BYTES)):
            break
        seen += piece
    if not seen.startswith(b"HTTP/1.1 200"):
        sys.exit("the server lets nobody watch")
    if STEP in seen:
        sys.exit("the engine told steps while nobody watched: turns with nobody are none")
    connection.setblocking(False)
    return connection


def wait_until_nobody_watches(address: str) -> None:
    until_s = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"http://{address}/metrics") as response:
            if re.search(rb"^twostroke_viewers 0", response.read(), re.MULTILINE):
                return
        time.sleep(LOOK_EVERY_S)
    sys.exit(f"the server still counts viewers {GONE_WITHIN_S:.0f} s after the last one left")


def balanced_orders(number: int) -> Iterator[list[int]]:
    """Orders of so many sides, without an end. In as many rounds as there are sides each has every place once, and
    with an even number of them each follows each other one equally often (Williams, 1949). Every second time round the
    orders run backwards, which does the same for odd numbers."""
    first = [(place + 1) // 2 if place % 2 else (number - place // 2) % number for place in range(number)]
    while True:
        for step in (1, -1):
            for shift in range(number):
                yield [(side + shift) % number for side in first][::step]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95% certainty, whatever the values' distribution: so few heads in so many tosses that
    fewer would come up in 2.5% of all cases at most. Of less than 6 values, the outermost ones."""
    ordered, number = sorted(values), len(values)
    rank, below = 0, 0.5**number
    while below + (more := math.comb(number, rank + 1) * 0.5**number) <= 0.025:
        rank, below = rank + 1, below + more
    return ordered[rank], ordered[number - 1 - rank]


@dataclass
class Side:
    num_viewers: int
    rates: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By process, in all turns together: the system counts hundredths of a second, and a turn has few of them."""
    seen_bytes: int = 0


def processes(api_pid: int) -> dict[str, list[int]]:
    children = Path(f"/proc/{api_pid}/task/{api_pid}/children")
    engine = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    return {"API": [api_pid], "engine": engine, "bench": [os.getpid()]}


def used_s(pids: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(cpu_s(pid) or 0.0 for pid in those) for name, those in pids.items()}


def play(side: Side, address: str, pids: dict[str, list[int]], batch: list[list[int]], length: int) -> None:
    with Viewers(address, side.num_viewers) as viewers:
        time.sleep(PAUSE_S)
        before_s, before_bytes = used_s(pids), viewers.num_bytes
        side.rates.append(server_rates(address, batch, length, reads=False))
        for name, after_s in used_s(pids).items():
            side.cpu_s[name] = side.cpu_s.get(name, 0.0) + after_s - before_s[name]
        side.seen_bytes += viewers.num_bytes - before_bytes
    wait_until_nobody_watches(address)


def lost_percent(rates: Sequence[float], without: Sequence[float]) -> list[float]:
    return [100.0 * (1.0 - ours / theirs) for ours, theirs in zip(rates, without, strict=True)]


def report(sides: list[Side], tokens_a_turn: int) -> None:
    nobody = [side for side in sides if not side.num_viewers]
    without = [statistics.fmean(rates) for rates in zip(*(side.rates for side in nobody), strict=True)]
    for side in sides:
        tokens = tokens_a_turn * len(side.rates)
        spent = ", ".join(f"{name} {seconds / tokens * 1e6:.1f}" for name, seconds in side.cpu_s.items())
        each_kb = side.seen_bytes / max(1, side.num_viewers) / len(side.rates) / 1e3
        rate = statistics.median(side.rates)
        print(f"{side.num_viewers:3d} viewers  {rate:.0f} tokens/s, {each_kb:.0f} kB to each, us a token: {spent}")
    print(
        "rate lost, percent, against the same round: median, where it lies with 95% certainty, quartiles of the rounds"
    )
    watched = [(f"{side.num_viewers} against nobody", side.rates, without) for side in sides if side.num_viewers]
    noise = [("nobody against nobody", side.rates, nobody[0].rates) for side in nobody[1:]]
    for name, rates, others in [*noise, *watched]:
        lost = lost_percent(rates, others)
        low, high = median_interval(lost)
        quarter, _, three_quarters = statistics.quantiles(lost, n=4)
        print(
            f"{name:>22}  {statistics.median(lost):+.2f}  [{low:+.2f}, {high:+.2f}]  "
            f"quartiles {quarter:+.1f}, {three_quarters:+.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--viewers", default="0,0,1,10", help="in turns; those with 0 are what the others are held to")
    parser.add_argument("--rounds", type=int, default=56, help="each side has a turn in every round")
    parser.add_argument("--paced-ms", type=float, help="each step sleeps so long, and computes nothing")
    options, engine_options = parser.parse_known_args()
    sides = [Side(int(number)) for number in options.viewers.split(",")]
    if all(side.num_viewers for side in sides) or options.rounds < 2:
        sys.exit("one of --viewers has to be 0, and --rounds at least 2")

    program = FORGETFUL
    if options.paced_ms is not None:
        os.environ[PACE], program = str(options.paced_ms), LAUNCHED + FORGETFUL
    with serving([sys.executable, "-c", program, *OPTIONS, options.model, *engine_options]) as (api_pid, address):
        pids = processes(api_pid)
        warming = [Side(side.num_viewers) for side in sides]
        rounds = [warming] + options.rounds * [sides]
        for number, (taking_part, order) in enumerate(zip(rounds, balanced_orders(len(sides)), strict=False)):
            batch = prompts(options.streams, options.input, number)
            for place in order:
                play(taking_part[place], address, pids, batch, options.output)
    print(f"{options.streams} streams, {options.input} in, {options.output} out, {options.rounds} rounds")
    report(sides, options.streams * options.output)


if __name__ == "__main__":
    main()
