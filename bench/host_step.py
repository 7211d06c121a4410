"""What the host spends on a step: scheduler, ledger and engine over a backend that answers at once. CPU time of the one
thread, so that a busy machine does not count; the backend's own is left out.

    python bench/host_step.py [--sequences 1,16,64,256] [--rounds 5] [--newcomer 8192,64] [--profile]

Last, what a newcomer takes until its first step is launched, by how many of its tokens are cached and how many are
not: where nothing else runs, nobody hides it."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import SampledToken, Step, StepResult
from twostroke.engine.engine import Engine
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

PROMPT_TOKENS, OUTPUT_TOKENS, WARM_STEPS, MEASURED_STEPS = 64, 200, 10, 180
ONE_TOKEN = (SampledToken(5),)
LAYOUTS = {"blocks of 16": (16, (None,)), "blocks of 64": (64, (None,)), "full and windowed": (16, (None, 64))}


class ReadyTicket:
    ready = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class InstantBackend:
    name = "instant"
    max_drafts = 0

    def __init__(self) -> None:
        self.own_s = 0.0

    def launch(self, step: Step) -> ReadyTicket:
        started_s = time.thread_time()
        sampled = {slot.seq_id: ONE_TOKEN for slot in step.decodes}
        sampled |= {chunk.seq_id: ONE_TOKEN for chunk in step.prefills if chunk.samples}
        ticket = ReadyTicket(StepResult(step.step_id, sampled))
        self.own_s += time.thread_time() - started_s
        return ticket

    def close(self) -> None:
        pass


def step_s(num_sequences: int, block_size: int, windows: tuple[int | None, ...]) -> float:
    """Seconds a step while every sequence decodes."""
    blocks = num_sequences * (PROMPT_TOKENS + OUTPUT_TOKENS + 2 * block_size) // block_size
    groups = tuple(KVGroup((layer,), window, blocks) for layer, window in enumerate(windows))
    config = SchedulerConfig(max_context=4096, max_tokens_per_step=PROMPT_TOKENS * num_sequences, max_running=1024)
    backend = InstantBackend()
    engine = Engine(Scheduler(config, KVLayout(block_size, groups)), backend, vocab_size=1000)
    sampling = SamplingParams(temperature=0.6, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for number in range(num_sequences):
        prompt = tuple((7 * number + index) % 1000 for index in range(PROMPT_TOKENS))
        engine.add(Request(f"r{number}", prompt, sampling))
    for _ in range(WARM_STEPS):
        engine.step()
    backend.own_s, started_s = 0.0, time.thread_time()
    for _ in range(MEASURED_STEPS):
        engine.step()
    return (time.thread_time() - started_s - backend.own_s) / MEASURED_STEPS


def newcomer_s(cached: int, new: int, block_size: int) -> tuple[float, float]:
    """To take it in, and to choose and launch its step."""
    layout = KVLayout(block_size, (KVGroup((0,), None, 4 * (cached + new) // block_size + 4),))
    config = SchedulerConfig(max_context=4 * (cached + new), max_tokens_per_step=1 << 20)
    engine = Engine(Scheduler(config, layout), InstantBackend(), 1 << 17)
    draw, sampling = random.Random(0), SamplingParams(max_tokens=1, ignore_eos=True)
    head = tuple(draw.randrange(1 << 17) for _ in range(cached))
    taken = []
    for number in range(8):
        request = Request(str(number), head + tuple(draw.randrange(1 << 17) for _ in range(new)), sampling)
        began_s = time.thread_time()
        engine.add(request)
        added_s = time.thread_time()
        engine.step()
        taken.append((added_s - began_s, time.thread_time() - added_s))
        while engine.busy:
            engine.step()
    return min(add_s for add_s, _ in taken[1:]), min(step_s for _, step_s in taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--newcomer", default="8192,64")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    counts = [int(text) for text in options.sequences.split(",")]
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(step_s, counts[-1], 16, (None,))
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    for name, layout in LAYOUTS.items():
        for count in counts:
            best_s = min(step_s(count, *layout) for _ in range(options.rounds))
            print(f"{name}, {count} sequences: {1e6 * best_s:.0f} us a step, {1e6 * best_s / count:.2f} a sequence")
    cached, new = (int(text) for text in options.newcomer.split(","))
    add_s, first_s = newcomer_s(cached, new, 64)
    print(f"a newcomer of {new} tokens behind {cached}: {1e6 * add_s:.0f} us to take in, {1e6 * first_s:.0f} to launch")


if __name__ == "__main__":
    main()
