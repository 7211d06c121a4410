"""Who drafts, in whole workloads on a card, with random weights of a config.json. An EAGLE-3 head with random weights
of its own: what a draft takes alone, what a step on nobody's rows takes with four of them, and workloads without drafts
("off"), with four a step ("four"), and with as many as the engine finds to pay ("policy"). How many hold is forced:
3.08 tokens a step of four drafts. Or lookup (`--speculate auto`), whose drafts the model itself judges: "off" and
"policy" in turns.

    PYTHONPATH=src:. python -m bench.cuda.eagle3 FOLDER [--workloads single,few,nano:64] [--speculate auto]"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from statistics import mean
from unittest.mock import patch

import numpy as np

from bench.cuda.clock import median_us, say
from bench.peers.gpu.drive import MAX_CONTEXT, MAX_RUNNING, MAX_TOKENS_PER_STEP
from bench.peers.gpu.workloads import TEMPERATURE, WORKLOADS, Result, run
from twostroke.backends.cuda import backend as cuda_backend
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.draft_clock import TIMED_STREAMS
from twostroke.backends.cuda.parts import PLAIN
from twostroke.config import EngineConfig
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts, Step, StepResult
from twostroke.engine.build import Assembly, build
from twostroke.lab import adapter
from twostroke.lab.adapter import EngineAdapter
from twostroke.models.heads import HEADS
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec, default_taps
from twostroke.models.random_weights import DrawnTensor
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.plan import Drafting

FORCED = [0] * 15 + [1] * 22 + [2] * 23 + [3] * 20 + [4] * 20
"""Drafts that hold, drawn from anew in each step: 2.08 on average."""
NUM_DRAFTS = 4
STEP_STREAMS = (1, 2, 4, 8, 16, 32)
WAYS = {"eagle3": "off,four,policy", "auto": "off,policy,off,policy", "off": "off"}
"""In turns, by who drafts."""
SEED = 3


def random_head(draft_vocab_size: int, source: str, target: ModelSpec) -> Eagle3Head:
    """Of one of the target's own layers, with tokens from all over its vocabulary."""
    spec = Eagle3Spec(
        layer=target.layers[0],
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        taps=default_taps(target.num_layers),
        norm_eps=target.norm_eps,
        max_context=target.max_context,
    )
    shapes = spec.tensor_shapes() | {"output": (draft_vocab_size, target.hidden_size)}
    tensors = {
        name: DrawnTensor(name, WeightKind.F32 if len(shape) == 1 else WeightKind.BF16, shape, SEED)
        for name, shape in shapes.items()
    }
    target_ids = np.arange(draft_vocab_size, dtype=np.int64) * (target.vocab_size // draft_vocab_size)
    return Eagle3Head(source, spec, tensors, target_ids)


class Four(Drafting):
    """Room for as many in every step."""

    def drafts(self, sequence: Stream, most: int) -> Drafts | None:
        return Drafts(min(most, NUM_DRAFTS))


def built(folder: str, speculate: str, draft_vocab_size: int) -> Assembly:
    config = EngineConfig(
        backend="cuda",
        load="random",
        quantise="none",
        max_context=MAX_CONTEXT,
        max_tokens_per_step=MAX_TOKENS_PER_STEP,
        max_running=MAX_RUNNING,
        speculate="eagle3:random" if speculate == "eagle3" else speculate,
    )
    if speculate != "eagle3":
        return build(folder, config, text=False)
    forced = partial(CudaBackend, forced=FORCED)
    head = partial(random_head, draft_vocab_size)
    with patch.object(cuda_backend, "CudaBackend", forced), patch.dict(HEADS, eagle3=head):
        return build(folder, config, text=False)


def step_times(backend: CudaBackend) -> None:
    """On the padding row: nobody's keys are read."""
    drafter, graphs = backend._drafter, backend._parts.graphs
    decodes, verifies, width = backend._decodes, backend._verifies, 1 + NUM_DRAFTS
    assert drafter is not None and verifies is not None
    alone = ", ".join(f"{1e6 * drafter.seconds(streams, 1):.1f} for {streams}" for streams in TIMED_STREAMS)
    say(f"us of a draft alone, by streams: {alone}")
    for streams in STEP_STREAMS:
        decodes._send(streams, [])
        plain_us = median_us(partial(graphs.run, ("decode", streams), partial(decodes._run, streams, PLAIN)))
        verifies._send(streams, width, [], ())
        work = partial(verifies._run, streams, width, makes=True)
        wide_us = median_us(partial(graphs.run, ("verify", streams, width, True), work))
        head_us = 1e6 * drafter.seconds(streams, NUM_DRAFTS)
        drafted = f"{wide_us:7.0f} ({wide_us / plain_us:.2f} x), of that the head {head_us:6.0f}"
        say(f"nobody's step of {streams:2d}: plain {plain_us:7.0f} us, with {NUM_DRAFTS} drafts {drafted}")


def play(assembly: Assembly, backend: CudaBackend, workload: str, way: str) -> None:
    """Measured as in `bench.peers.gpu`. `workload`: its name, and behind a colon how many requests, if not as many as
    ever."""
    engine, drafted, came = assembly.engine, list[int](), list[int]()

    def watch(_: Step, result: StepResult) -> None:
        for seq_id, own in result.drafted.items():
            if seq_id in result.sampled:
                drafted.append(own.num_drafts)
                came.append(len(result.sampled[seq_id]))

    own_drafting, speculator = engine.scheduler._decodes.drafting, backend._guesser.speculator
    engine.on_step = watch
    if way == "off":  # as an engine that was started so
        backend._guesser.speculator = None
    engine.scheduler.draft({"off": None, "four": Four()}.get(way, own_drafting))
    # The adapter asks for no drafts; None leaves them to the engine.
    with patch.object(adapter, "NO_DRAFTS", None):
        found = run_some(workload, EngineAdapter(engine, temperature=TEMPERATURE), assembly.checkpoint.spec.vocab_size)
    engine.scheduler.draft(own_drafting)
    backend._guesser.speculator = speculator
    slots = f"{len(drafted)} slots with drafts"
    if drafted:
        slots += f", {mean(drafted):.2f} each, {mean(came):.2f} tokens came"
    say(f"{workload:8s} {way:6s} {json.dumps(found)} {slots}")


def run_some(workload: str, engine: EngineAdapter, vocab_size: int) -> Result:
    name, _, count = workload.partition(":")
    with patch.dict(WORKLOADS, {name: partial(WORKLOADS[name], n=int(count))} if count else {}):
        return run(name, engine, vocab_size)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--workloads", default="single,few,answers", help="of bench.peers.gpu; NAME:N: of N")
    parser.add_argument("--speculate", choices=WAYS, default="eagle3")
    parser.add_argument("--ways", help=f"in this order; default: {WAYS}")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="tokens that the head knows")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    began_s = time.perf_counter()
    assembly = built(options.folder, options.speculate, options.draft_vocab)
    say(f"built in {time.perf_counter() - began_s:.1f} s", *assembly.notes, sep="\n    ")
    backend = assembly.engine.backend
    assert isinstance(backend, CudaBackend)
    if backend._drafter is not None:
        step_times(backend)
    ways = (options.ways or WAYS[options.speculate]).split(",")
    for workload in filter(None, options.workloads.split(",")):
        for way in ways:
            play(assembly, backend, workload, way)
    speculator = backend._guesser.speculator
    say("done; faults of drafters:", speculator.faults if speculator is not None else [])
    assembly.engine.close()


if __name__ == "__main__":
    main()
