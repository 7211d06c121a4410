"""Predictions beside measurements: what the calibrated cost of a step, and the simulation on top of it, said before,
and what this machine then did.

    python -m bench.prediction [MODEL] [--parts calibrate,steps,requests,trace,h200,speed] [--seconds 20]

`calibrate` stores what the other parts then predict from, unchanged; without it, what `twostroke calibrate` stored is
taken. Each part says how much of the processors others took meanwhile: what was measured beside them means little.
`h200` needs no machine: bench/prediction_h200.py predicts what is recorded in bench/results. `speed` times a run:
seconds of one core, so that a busy machine counts little."""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bench.peers.guard import processor_times, shares
from twostroke.config import EngineConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.cost.calibration import Calibration
from twostroke.cost.floor import StepWork, work_of
from twostroke.engine.build import Assembly, build
from twostroke.engine.calibrate import TEMPERATURE, fit, observe_spread
from twostroke.lab.prediction import prefill_steps
from twostroke.planner.report import percentiles
from twostroke.planner.simulate import ReplicaSpec, simulate
from twostroke.planner.trace import Lengths, TraceRequest, poisson

PARTS = ("calibrate", "steps", "requests", "trace", "h200", "speed")
MIXED_S = 14.0
NUM_REQUESTS = 50
BUCKETS = ((1, 15), (16, 50), (51, 300), (301, 1500))
"""Of prompt lengths. Matrix products take rows by 16 here, and fewer in smaller tiles, dearer a row."""
TRACE = (2.8, 110, Lengths(50, 500), Lengths(10, 60))
"""Requests a second, requests, prompts, answers: this machine is busy about half of the time."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of the table."""

    name: str
    predicted: str
    measured: str
    error: float
    asked: float

    def __str__(self) -> str:
        verdict = "holds" if self.error <= self.asked else "MISSED"
        return (
            f"{self.name:<44} {self.predicted:>12} {self.measured:>12} {self.error:>8.1%}  "
            f"at most {self.asked:.0%}: {verdict}"
        )


def compared(name: str, predicted_s: float, measured_s: float, asked: float) -> Line:
    error = abs(predicted_s - measured_s) / measured_s
    return Line(name, f"{1e3 * predicted_s:.2f} ms", f"{1e3 * measured_s:.2f} ms", error, asked)


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Says how much of the processors others took."""
    before, started_s = processor_times(), time.perf_counter()
    yield
    wall_s = time.perf_counter() - started_s
    foreign, stolen = shares(before, processor_times(), wall_s, os.cpu_count() or 1)
    print(f"{name}: {wall_s:.1f} s, others took {foreign + stolen:.0%} of the processors", flush=True)


class Player:
    """Requests of random tokens on a real engine."""

    def __init__(self, assembly: Assembly) -> None:
        self.engine = assembly.engine
        self._vocab_size = assembly.checkpoint.spec.vocab_size
        self._random = random.Random(11)
        self._count = 0

    def add(self, prompt_len: int, out_len: int) -> str:
        self._count += 1
        tokens = tuple(self._random.randrange(self._vocab_size) for _ in range(prompt_len))
        sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=out_len, ignore_eos=True)
        return self.engine.add(Request(f"prediction-{self._count}", tokens, sampling))

    def step(self) -> dict[str, SequenceTiming]:
        """The timings of what has ended."""
        events = [event for event in self.engine.step() if isinstance(event, TokenEvent)]
        return {event.request_id: event.timing for event in events if event.timing is not None}

    def drain(self) -> dict[str, SequenceTiming]:
        found: dict[str, SequenceTiming] = {}
        while self.engine.busy:
            found |= self.step()
        return found


def calibrate(assembly: Assembly, limit_s: float) -> None:
    rounds = list(observe_spread(assembly.engine, assembly.checkpoint.spec.vocab_size, limit_s))
    found = fit(assembly.shape, assembly.ceilings(), rounds)
    assembly.preparation.keep_calibration(found)


def mixed_steps(assembly: Assembly, calibration: Calibration) -> list[Line]:
    """Requests of many lengths, alone and in crowds, for some seconds: each step's prediction, made with the stored
    calibration, beside what it took; and the same while the fit goes on learning, as an engine's own does."""
    seen: list[tuple[StepWork, float]] = []

    def note(step: Step, result: StepResult) -> None:
        seen.append((work_of(step), result.compute_s))

    player, generator = Player(assembly), random.Random(7)
    player.engine.on_step = note
    started_s = time.perf_counter()
    due_s = started_s
    while time.perf_counter() - started_s < MIXED_S or player.engine.busy:
        now_s = time.perf_counter()
        if due_s <= now_s < started_s + MIXED_S:
            crowd = generator.choice([1, 1, 1, 2, 4, 8])
            for _ in range(crowd):
                player.add(generator.choice([8, 30, 100, 200, 400, 800, 1500]), generator.choice([8, 16, 40, 80]))
            due_s = now_s + generator.expovariate(1 / (0.35 * crowd))
        if player.engine.busy:
            player.step()
        else:
            time.sleep(max(0.0, min(due_s, started_s + MIXED_S) - time.perf_counter()))
    player.engine.on_step = None
    frozen, learning = calibration.step_cost(assembly.shape), calibration.step_cost(assembly.shape)
    misses: list[float] = []
    kinds: dict[str, list[tuple[float, float]]] = {}
    for work, seconds in seen:
        predicted_s = frozen.seconds(work)
        misses.append(abs(predicted_s - seconds) / seconds)
        kind = "mixed" if work.chunks and len(work.contexts) else "prefill" if work.chunks else "decode"
        kinds.setdefault(kind, []).append((predicted_s, seconds))
        learning.observe(work, seconds)
    for kind, pairs in sorted(kinds.items()):
        error = statistics.fmean(abs(predicted_s - seconds) / seconds for predicted_s, seconds in pairs)
        median_ms = 1e3 * statistics.median(seconds for _, seconds in pairs)
        print(f"  {kind}: {len(pairs)} steps, median {median_ms:.1f} ms, off by {error:.1%} on average")
    assert learning.error is not None
    total_s, predicted_total_s = sum(seconds for _, seconds in seen), sum(frozen.seconds(work) for work, _ in seen)
    print(f"  all of them: {predicted_total_s:.2f} s predicted, {total_s:.2f} s measured")
    return [
        Line(f"step, mean over {len(seen)}", "calibrated", "", statistics.fmean(misses), 0.15),
        Line("step, the latest, while it goes on learning", "online", "", learning.error, 0.15),
    ]


def leaning(pairs: list[tuple[float, float]], chosen: list[int]) -> float:
    """By how much the chosen ones are predicted too high in the median, as a share."""
    return statistics.median(pairs[index][0] / pairs[index][1] - 1 for index in chosen)


def single_requests(assembly: Assembly, spec: ReplicaSpec) -> list[Line]:
    """Each alone, of random lengths: TTFT and TPOT as simulated, and as they were."""
    player, generator = Player(assembly), random.Random(5)
    ttft, tpot, lengths, steps, beside = [], [], [], [], []
    for _ in range(NUM_REQUESTS):
        prompt_len, out_len = int(10 * 150 ** generator.random()), generator.randint(8, 48)
        predicted = simulate(spec, [TraceRequest(0.0, prompt_len, out_len)])
        lengths.append(prompt_len)
        player.add(prompt_len, out_len)
        (measured,) = player.drain().values()
        assert measured.ttft_s is not None and measured.tpot_s is not None
        ttft.append((predicted.ttft_s["p50"], measured.ttft_s))
        tpot.append((predicted.tpot_s["p50"], measured.tpot_s))
        works = prefill_steps(prompt_len, spec.scheduler.chunk_limit)
        steps_s = sum(map(spec.step_seconds, works))
        steps.append((steps_s, measured.prefill_compute_s))
        beside.append((predicted.ttft_s["p50"] - steps_s, measured.ttft_s - measured.prefill_compute_s))
    lines = []
    for name, pairs in (("TTFT", ttft), ("TPOT", tpot)):
        errors = sorted(abs(predicted_s - measured_s) / measured_s for predicted_s, measured_s in pairs)
        inside = sum(error <= 0.20 for error in errors)
        print(f"  {name}: {inside} of {len(errors)} within 20%, the median off by {statistics.median(errors):.1%}")
        # Whether something other than the machine's moods is behind it: which lengths lean which way, and with what.
        for least, most in BUCKETS:
            chosen = [index for index, length in enumerate(lengths) if least <= length <= most]
            if not chosen:
                continue
            leans = f"{leaning(pairs, chosen):+.1%}"
            if pairs is ttft:
                predicted_us, measured_us = (
                    1e6 * statistics.median(beside[at][side] for at in chosen) for side in (0, 1)
                )
                leans += (
                    f": steps {leaning(steps, chosen):+.1%}, beside them {predicted_us:.0f} us for {measured_us:.0f}"
                )
            print(f"    prompts of {least} to {most} tokens: {len(chosen)}, the median predicted {leans}")
        lines.append(
            Line(f"{name} of {len(pairs)} requests alone, mean", "simulated", "", statistics.fmean(errors), 0.20)
        )
    return lines


def whole_trace(assembly: Assembly, spec: ReplicaSpec) -> list[Line]:
    """Random arrivals: the same trace on the engine and in the simulation."""
    rate, count, prompts, outputs = TRACE
    trace = poisson(rate, count, prompts, outputs, seed=3)
    predicted = simulate(spec, trace)
    player = Player(assembly)
    found: dict[str, SequenceTiming] = {}
    due: dict[str, float] = {}
    started_s, waiting = time.perf_counter(), list(trace)
    while waiting or player.engine.busy:
        now_s = time.perf_counter() - started_s
        while waiting and waiting[0].arrival_s <= now_s:
            asked = waiting.pop(0)
            due[player.add(asked.prompt_tokens, asked.output_tokens)] = started_s + asked.arrival_s
        if player.engine.busy:
            found |= player.step()
        elif waiting:
            time.sleep(max(0.0, waiting[0].arrival_s - (time.perf_counter() - started_s)))
    # From when each was due: a request that arrives in the middle of a step is taken after it.
    ttft = percentiles([timing.token_times_s[0] - due[name] for name, timing in found.items()])
    itl = percentiles([gap_s for timing in found.values() for gap_s in timing.itl_s])
    print(f"  {count} requests at {rate}/s, replica busy {predicted.busy_share:.0%} of the time as simulated")
    return [
        compared(f"trace, {name} {part}", values[part], measured[part], 0.25)
        for name, values, measured in (("TTFT", predicted.ttft_s, ttft), ("ITL", predicted.itl_s, itl))
        for part in ("p50", "p90", "p99")
    ]


def spec_of(assembly: Assembly, calibration: Calibration) -> ReplicaSpec:
    prepared = assembly.preparation
    return ReplicaSpec(
        calibration.step_cost(assembly.shape).seconds,
        assembly.shape,
        calibration.ceilings,
        prepared.scheduler_config,
        prepared.resolved.layout,
        host_s=calibration.host_s,
        newcomer_s=calibration.newcomer_s,
        newcomer_s_per_token=calibration.newcomer_s_per_token,
    )


def on_this_machine(model: str, parts: list[str], limit_s: float) -> list[Line]:
    assembly = build(model, replace(EngineConfig(), backend="cpu"), text=False)
    gc.collect()
    gc.freeze()
    lines: list[Line] = []
    try:
        if "calibrate" in parts:
            with watched("calibrate"):
                calibrate(assembly, limit_s)
        calibration = assembly.preparation.calibration()
        if calibration is None:
            raise SystemExit(f"nothing is calibrated: add calibrate to --parts, or run twostroke calibrate {model}")
        print(f"calibrated {calibration.taken} on {calibration.num_steps} steps, off by {calibration.error:.1%}")
        print(
            f"  {calibration.coefficients}, host {1e6 * calibration.host_s:.0f} us, a newcomer "
            f"{1e6 * calibration.newcomer_s:.0f} us and {1e6 * calibration.newcomer_s_per_token:.3f} us a prompt token"
        )
        if "steps" in parts:
            with watched("steps"):
                lines += mixed_steps(assembly, calibration)
        spec = spec_of(assembly, calibration)
        if "requests" in parts:
            with watched("requests"):
                lines += single_requests(assembly, spec)
        if "trace" in parts:
            with watched("trace"):
                lines += whole_trace(assembly, spec)
    finally:
        assembly.engine.close()
    return lines


def recorded_h200() -> list[Line]:
    from bench.prediction_h200 import predictions

    print("h200: fitted to single steps and prompts of the records, then played as workloads")
    lines = []
    for name, predicted, recorded in predictions():
        unit, scale = ("tok/s", 1.0) if name.endswith("output") else ("ms", 1e3)
        error = abs(predicted - recorded) / recorded
        lines.append(
            Line(f"H200 {name}", f"{scale * predicted:.1f} {unit}", f"{scale * recorded:.1f} {unit}", error, 0.2)
        )
    mean = statistics.fmean(line.error for line in lines)
    return [*lines, Line(f"H200, mean of {len(lines)}", "simulated", "recorded", mean, 0.2)]


def simulation_speed() -> Line:
    """Ten thousand requests on eight replicas, on one core; then with short answers."""
    from bench.prediction_h200 import MODELS, replica_of

    spec, _, _ = replica_of(MODELS[0])

    def timed(num_requests: int, answers: Lengths) -> float:
        trace = poisson(100.0, num_requests, Lengths(200, 2000), answers)
        started_s = time.process_time()
        report = simulate(spec, trace, replicas=8)
        took_s = time.process_time() - started_s
        print(
            f"  {num_requests:,} requests, answers of {answers.least} to {answers.most}: {report.num_steps:,} "
            f"steps, {report.served.output_tokens:,} tokens in {took_s:.2f} s, {num_requests / took_s:,.0f} requests/s",
            flush=True,
        )
        return took_s

    took_s = timed(10_000, Lengths(50, 300))
    timed(10_000, Lengths(20, 60))
    return Line("10,000 requests simulated on 8 replicas", "20 s", f"{took_s:.1f} s", took_s / 20.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="for the calibration")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    lines: list[Line] = []
    if set(parts) - {"h200", "speed"}:
        lines += on_this_machine(options.model, parts, options.seconds)
    if "h200" in parts:
        lines += recorded_h200()
    if "speed" in parts:
        with watched("speed"):
            lines.append(simulation_speed())
    print(f"\n{'figure':<44} {'predicted':>12} {'measured':>12} {'off by':>8}")
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
