"""W4 through the engine, for several source trees in turns: 16 requests one after another behind a shared prefix of
1024 tokens, 32 of their own and 32 out; the time to the first token of the 2nd to the 16th, as `bench/peers` takes it.
The machine changes from minute to minute, so only figures of one run are comparable.

    python bench/prefix_hit.py [--sources src,../old/src] [--turns 8] [--own 32] [--prefix 1024] [--threads 2]

Each tree has a process of its own, which waits while the other's turn lasts. Prompts are stretches of the text that
`bench/peers` uses, a fresh one for every turn, the same for every tree."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent
REQUESTS, OUTPUT_TOKENS = 16, 32


class Worker:
    """A process that runs one source tree's engine, a turn for every line it is sent."""

    def __init__(self, source: str, options: argparse.Namespace) -> None:
        arguments = ["--turns", str(options.turns), "--own", str(options.own), "--prefix", str(options.prefix)]
        arguments += ["--threads", str(options.threads), "--model", options.model, "--serve"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=os.environ | {"PYTHONPATH": f"{Path(source).resolve()}:{REPOSITORY}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first_tokens_ms: list[float] = []
        self._read()

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def _read(self) -> list[float]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit("a worker ended: its error is above")
        return [float(number) for number in json.loads(line)]

    def take_turn(self) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write("go\n")
        pipe.flush()
        self.first_tokens_ms += self._read()

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait(timeout=30)


def serve(options: argparse.Namespace) -> None:
    """The worker's side: a list of milliseconds for each turn."""
    import twostroke
    from bench.peers.workloads import PromptSource, Workload, library_text

    def first_token_ms(prompt: list[int]) -> float:
        started_s, first_s = time.perf_counter(), None
        engine.add(llm.request(prompt, sampling))
        while engine.busy:
            for event in engine.step():
                if first_s is None and getattr(event, "token_ids", ()):
                    first_s = time.perf_counter()
        assert first_s is not None
        return 1e3 * (first_s - started_s)

    with twostroke.LLM(options.model, threads=options.threads, backend="cpu") as llm:
        engine = llm.engine
        sampling = twostroke.SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        own = (options.own, options.own)
        workload = Workload("w4", "", own, OUTPUT_TOKENS, REQUESTS, False, shared_prefix_tokens=options.prefix)
        prompts = PromptSource(llm.tokenizer.encode(library_text()))
        print("[]", flush=True)
        for _ in sys.stdin:
            _, *hits = [first_token_ms(prompt) for prompt in prompts.prompts(workload)]
            print(json.dumps(hits), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", default=str(REPOSITORY / "src"), help="trees to take turns, commas between")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt behind the prefix")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    sources = options.sources.split(",")
    workers = [Worker(source, options) for source in sources]
    turns: list[list[float]] = []
    for _ in range(options.turns):
        for worker in workers:
            worker.take_turn()
        turns.append([statistics.median(worker.first_tokens_ms[1 - REQUESTS :]) for worker in workers])
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    print(f"{now}, Python {platform.python_version()}, {' '.join(sys.argv)}")
    print(
        f"{options.turns} turns of {REQUESTS - 1} hits, {options.own} tokens behind {options.prefix}, ms to the first"
    )
    for source, worker in zip(sources, workers, strict=True):
        worker.close()
        times = worker.first_tokens_ms
        least, middle, mean = min(times), statistics.median(times), statistics.mean(times)
        print(f"{source:40} least {least:6.2f}  median {middle:6.2f}  mean {mean:6.2f}  worst {max(times):6.2f}")
    print("medians of each turn: " + "; ".join(" ".join(f"{middle:.1f}" for middle in turn) for turn in turns))


if __name__ == "__main__":
    main()
