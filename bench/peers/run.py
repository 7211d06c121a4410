"""The command: reads the options, runs the parts asked for, shows one table, writes the results."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from bench.peers.crew import Crew
from bench.peers.engines import ALL_ENGINES, DEFAULT_ENGINES, Engine, choose_engines
from bench.peers.floors import Yardstick
from bench.peers.guard import Guard
from bench.peers.home import RESULTS, Home
from bench.peers.machine_facts import machine_facts, revision
from bench.peers.quality import FIXED_TEXT, measure_quality
from bench.peers.report import Report
from bench.peers.speed import Plan, measure_speed
from bench.peers.startup import measure_startup
from bench.peers.workloads import PromptSource, choose_workloads, library_text
from twostroke.core.errors import TwostrokeError
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve
from twostroke.text.loading import load_tokenizer

PARTS = ("install", "speed", "start", "quality")
AGREEMENT_PROMPTS = 4
AGREEMENT_TOKENS = 32
QUICK_TEXT_TOKENS = 256


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_ENGINES), help=f"of {', '.join(ALL_ENGINES)}; all (default: %(default)s)"
    )
    parser.add_argument("--workloads", default="w1,w2,w3,w4", help="default: %(default)s")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to do (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--retries", type=int, default=2, help="how often a noisy sample is taken again")
    parser.add_argument("--max-wait-s", type=float, default=20.0, help="for a quiet machine, before each sample")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name that Twostroke knows")
    parser.add_argument("--home", default=None, help="folder of venvs and models (default: $BENCH_HOME, else bench/)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny workloads, no waiting: proves the harness only")
    options = parser.parse_args(arguments)
    options.engines = options.engines.split(",")
    options.workloads = options.workloads.split(",")
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are: {', '.join(PARTS)}")
    if options.repetitions < 1 or options.threads < 1 or options.retries < 0:
        parser.error("repetitions and threads must be at least 1, retries at least 0")
    if options.quick:
        options.retries, options.max_wait_s = 0, 0.0
    return options


class Voice:
    """Tells the user what happens, with the time since the start."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def __call__(self, message: str) -> None:
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        print(f"[{minutes:3d}:{seconds:02d}] {message}", file=sys.stderr, flush=True)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    say = Voice()
    try:
        engines = choose_engines(options.engines)
        workloads = choose_workloads(options.workloads, options.quick)
        source_path = resolve(options.model, progress=say)
        if source_path.suffix != ".gguf":
            raise ValueError("the peers' weights are made from a GGUF file; give one as --model")
    except (TwostrokeError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    report = Report(
        started_at=datetime.now(),
        command=os.environ.get("BENCH_COMMAND") or shlex.join(["python", "-m", "bench.peers", *given]),
        revision=revision(),
        model=source_path.name,
        threads=options.threads,
        quick=options.quick,
        machine=machine_facts(),
        workloads=workloads,
        engines=[engine.name for engine in engines],
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside: what is known is still written
    crew = Crew(Home.find(options.home), source_path, options.threads, say)
    try:
        _run_parts(crew, crew.prepare(engines), report, options)
    except KeyboardInterrupt:
        say("interrupted: what was measured so far follows")
    finally:
        crew.end()
    report.installs, report.facts = crew.installs, crew.facts
    # A page that is published names no folder of the machine that made it.
    report.absent = {name: reason.replace(str(crew.home.folder), "bench") for name, reason in crew.absent.items()}
    report.duration_s = say.elapsed_s
    for heading, table in report.tables().items():
        print(f"\n{heading}\n{table}")
    if report.samples or report.quality:
        for path in report.write(options.results):
            say(f"written: {path}")
    return 0


def _run_parts(crew: Crew, engines: list[Engine], report: Report, options: argparse.Namespace) -> None:
    checkpoint = load_checkpoint(crew.source, name=crew.source.stem)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.gguf_metadata)
    prompts = PromptSource(tokenizer.encode(library_text()))
    report.prompts_fingerprint = prompts.fingerprint
    (first_workload,) = choose_workloads(["w1"], options.quick)
    agreement_prompts = [prompts.prompts(first_workload)[0] for _ in range(AGREEMENT_PROMPTS)]
    guard = Guard(options.threads, options.max_wait_s)
    plan = Plan(report.workloads, options.repetitions, options.retries)
    if "start" in options.parts:
        measure_startup(crew, engines, first_workload, plan, prompts, guard, report.samples)
    if "speed" in options.parts:
        yardstick = Yardstick(crew.source, options.threads)
        yardstick.measure()
        crew.start_all(crew.present(engines))
        try:
            measure_speed(crew, engines, plan, prompts, guard, yardstick.measure, report.samples)
        finally:
            crew.end()
        report.ceilings, report.ceilings_measured = yardstick.ceilings, yardstick.measured
        for workload in report.workloads:
            values = yardstick.best_values(workload)
            report.best.update({f"{workload.name}.{name}": value for name, value in values.items()})
    if "quality" in options.parts:
        text_ids = list(tokenizer.encode(FIXED_TEXT.read_text(encoding="utf-8")))
        if options.quick:
            text_ids = text_ids[:QUICK_TEXT_TOKENS]
        report.quality = measure_quality(crew, engines, agreement_prompts, AGREEMENT_TOKENS, text_ids)
