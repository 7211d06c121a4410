"""What a handoff costs: a prompt read by one server and answered by another, beside one server that does both.

    python -m bench.handoff [--tokens 1000] [--rounds 15] [--transfer nixl|sockets|both] [--late]
    python -m bench.handoff --tokens 8000 --transfer sockets --host-gb 4 \\
        --serve 'FOLDER --backend cuda --max-context 8200 --kv-memory 4GB'

Each round asks a fresh prompt of all of them, in turns; nothing else is asked meanwhile. `early`: of the bytes, the
share that was there before the request for them; `--late` has all of them come after reading. `handoff`: from that
request to the last of them. `first token`: of the leg that writes, which gets it from the one that reads, and waits for
no KV. `second token`: from the first to the next, as the client is told them; the handoff is in it. `overhead`: both
legs' time to first token less that of one server alone, round by round; the HTTP calls between are in it, a router is
not. `of two tokens`: the same to the second. `its last tokens`: what that server takes for the same prompt with other
tokens behind its last whole block, whose KV it has: a writer computes as much, whatever a handoff takes.
Rounds before the first that counts use all KV of every server once.

Servers share the cores with each other and with whoever else is there. What others do to a wall clock is more than what
is looked for, unless the machine is quiet: `processor time more` is that of both servers less that of the one alone."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.cluster.fleets import FLEET_OPTIONS, NOBODY, PLAIN_OPTIONS, read, servers
from tests.cluster.routing import descendants
from tests.server.running import CLIENT, RunningServer

BLOCK_SIZE = 16
NUM_WARM = 10


@dataclass
class Round:
    """In seconds."""

    early_share: float
    """Of the bytes."""
    handoff: float
    reads: float
    first_token: float
    second_token: float
    """After the first."""
    alone: float
    alone_second: float
    last_tokens: float
    worked_more: float
    """Processor time of both servers, less that of one server alone; without that of the threads that fetch."""

    @property
    def overhead(self) -> float:
        return self.reads + self.first_token - self.alone

    @property
    def of_two_tokens(self) -> float:
        return self.overhead + self.second_token - self.alone_second


def prompt_of(drawn: random.Random, num_tokens: int) -> list[int]:
    return [drawn.randrange(1000, 40_000) for _ in range(num_tokens)]


def worked_s(server: RunningServer) -> float:
    """Processor time of the threads that its processes have now: those that fetch end with their fetch (Linux)."""
    pids = {server.process.pid, *descendants(server.process.pid)}
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return 1e-9 * sum(int(thread.read_text().split()[0]) for thread in threads)


def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    answer = ask()
    return time.perf_counter() - began_s, answer


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> AbstractContextManager[httpx.Response]:
    return CLIENT.stream("POST", server.address + path, json=body)


def streamed(ask: Callable[[], AbstractContextManager[httpx.Response]]) -> tuple[float, float, dict[str, Any]]:
    """Until its first token, from there to its second, and its timing. Each token is an event: it has a probability."""
    began_s, told_s, last = time.perf_counter(), list[float](), "{}"
    with ask() as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                told_s.append(time.perf_counter())
                last = line.removeprefix("data: ")
    timing: dict[str, Any] = json.loads(last)["timing"]
    return told_s[0] - began_s, told_s[1] - told_s[0], timing


def measured(
    transfer: str, num_tokens: int, rounds: int, num_warm: int, serve: tuple[str, ...], host_gb: float, named: str
) -> None:
    """`named`: who will write, as a router names it; empty: it does not."""
    drawn, path = random.Random(3), "/v1/completions"
    of_fleet = (*FLEET_OPTIONS, "--kv-host-gb", f"{host_gb:g}")
    found: list[Round] = []
    num_kept = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(Path(folder), "prefill", "decode", "alone", transfer=transfer, of_all=serve, of_fleet=of_fleet) as (
            reader,
            writer,
            alone,
        ),
    ):
        model = alone.get("/v1/models").json()["data"][0]["id"]
        for number in range(num_warm + rounds):
            prompt = prompt_of(drawn, num_tokens)
            body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
            body |= {"logprobs": 0, "stream": True}
            other = {**body, "prompt": prompt[:num_kept] + prompt_of(drawn, num_tokens - num_kept)}

            worked = [worked_s(server) for server in (reader, writer, alone)]

            def by_two(body: dict[str, Any] = body) -> tuple[float, float, float, Any]:
                reads_s, params = timed(lambda: read(reader, path, body, named))
                handed = {**body, "kv_transfer_params": params}
                first_s, second_s, timing = streamed(lambda: stream(writer, path, handed))
                return reads_s, first_s, second_s, timing["handoff"]

            def by_one(body: dict[str, Any] = body) -> tuple[float, float]:
                return streamed(lambda: stream(alone, path, body))[:2]

            if number % 2:
                alone_s, alone_second_s = by_one()
                reads_s, first_s, second_s, handoff = by_two()
            else:
                reads_s, first_s, second_s, handoff = by_two()
                alone_s, alone_second_s = by_one()
            now = [worked_s(server) for server in (reader, writer, alone)]
            more = [after_s - before_s for before_s, after_s in zip(worked, now, strict=True)]
            last_s, _, _ = streamed(lambda: stream(alone, path, other))  # noqa: B023 - called at once
            if handoff["why_not"] is not None:
                raise SystemExit(f"it was not handed over: {handoff['why_not']}")
            if number >= num_warm:
                early_share, more_s = handoff["early_bytes"] / handoff["bytes"], more[0] + more[1] - more[2]
                seconds = (reads_s, first_s, second_s, alone_s, alone_second_s, last_s, more_s)
                found.append(Round(early_share, handoff["seconds"], *seconds))
    tell(transfer, num_tokens, handoff, found)


def tell(transfer: str, num_tokens: int, handoff: dict[str, Any], found: list[Round]) -> None:
    def row(what: str, name: str, note: str = "", times: float = 1e3) -> str:
        low, middle, high = statistics.quantiles([times * getattr(one, name) for one in found], n=4)
        return f"  {what:20}{middle:8.1f}{f'{low:.1f} to {high:.1f}':>18}  {note}".rstrip()

    size, typical_s = handoff["bytes"], statistics.median(one.handoff for one in found)
    late_bytes = size * (1.0 - statistics.median(one.early_share for one in found))
    rate = f", {late_bytes / typical_s / 1e9:.2f} GB/s of what was not there" if typical_s else ""
    print(f"{transfer}: prompts of {num_tokens} tokens, KV of {handoff['tokens']} handed over")
    print(f"  {f'ms, {len(found)} rounds':20}{'median':>8}{'half of them':>18}")
    print(row("early, percent", "early_share", f"of {size / 1e6:.1f} MB", times=100.0))
    print(row("handoff", "handoff", f"{late_bytes / 1e6:.1f} MB{rate}"))
    print(row("the leg that reads", "reads"))
    print(row("first token", "first_token", "of the leg that writes"))
    print(row("second token", "second_token", "after that"))
    print(row("one server alone", "alone", "to its first token"))
    print(row("its second token", "alone_second", "after that"))
    print(row("its last tokens", "last_tokens", "the rest cached"))
    print(row("overhead", "overhead"))
    print(row("of two tokens", "of_two_tokens"))
    print(row("processor time more", "worked_more", "of both servers, without the handoff"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=NUM_WARM, help="Rounds before the first that counts.")
    parser.add_argument("--transfer", default="both", choices=("nixl", "sockets", "both"))
    parser.add_argument("--serve", default=shlex.join(PLAIN_OPTIONS), help="Model and options of all three servers.")
    parser.add_argument("--host-gb", type=float, default=0.3, help="Memory that KV travels through, of each server.")
    parser.add_argument("--late", action="store_true", help="Nothing is sent before a prompt was read.")
    options = parser.parse_args()
    serve = tuple(shlex.split(options.serve))
    for transfer in ("sockets", "nixl") if options.transfer == "both" else (options.transfer,):
        named = NOBODY if options.late else ""
        measured(transfer, options.tokens, options.rounds, options.warm, serve, options.host_gb, named)


if __name__ == "__main__":
    main()
