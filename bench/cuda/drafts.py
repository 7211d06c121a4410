"""Drafts on a card: whether tiny float32 answers stay equal with them; how many greedy tokens of the whole shape differ
in bf16; what a step that verifies takes beside a plain one; tokens a second where a given number of drafts holds.
Random weights of a config.json.

    PYTHONPATH=src:. python -m bench.cuda.drafts FOLDER [--parts tiny,greedy,times,forced]

Of 30B weights and their copies: --parts times,forced --streams 1,8,32,64 --contexts 512 --blocks 1600"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cuda.clock import median_us, say
from bench.cuda.draft_rig import ROOM, Answers, Rig, Told, requests_of, rig_of
from twostroke.backends.cuda.parts import PLAIN
from twostroke.backends.cuda.verify import WIDTHS, Guess
from twostroke.core.formats import PACKED, Formats
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.config import SchedulerConfig

PARTS = ("tiny", "greedy", "times", "forced")
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4000,
}
TINY_SIZES = SchedulerConfig(max_context=512, max_tokens_per_step=512, max_running=16)
SIZES = SchedulerConfig(max_context=8192, max_tokens_per_step=8192, max_running=64)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "filtered": {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1},
}
CONTEXTS, STREAMS, FORCED_STREAMS = (512, 4096), (1, 7, 32, 48), (1, 7, 48)
BLOCK_SIZE, NUM_BLOCKS = 64, 3600
DRAWN = 64
DRAWN_SHARES = (0.2, 0.2, 0.2, 0.12, 0.28)
"""Of steps with four drafts in which 0, 1, 2, 3 and 4 of them hold: about three tokens a step."""
BY_THE_MODEL = -1
"""Forced on a step: the model's own word on its drafts."""


def differing(ours: Answers, theirs: Answers) -> str:
    """Behind a token that differs all others may: so each answer counts up to the first."""
    parted = total = 0
    for name, expected in theirs.items():
        pairs = enumerate(zip(ours[name], expected, strict=True))
        same = next((place for place, (one, other) in pairs if one != other), len(expected))
        parted += same < len(expected)
        total += min(same + 1, len(expected))
    return f"{parted} of {len(theirs)} streams differ, {parted} of {total} tokens"


def tiny(folder: Path, draw: np.random.Generator) -> None:
    with tempfile.TemporaryDirectory() as small:
        config = json.loads((folder / "config.json").read_text()) | TINY
        (Path(small) / "config.json").write_text(json.dumps(config))
        checkpoint = random_checkpoint(Path(small), WeightKind.F32)
    rig = rig_of(checkpoint, TINY_SIZES, Formats("f32", "f32", "f32"), block_size=16, num_blocks=400)
    for name, sampling in SAMPLINGS.items():
        requests = requests_of(draw, 8, rig.vocab_size, **sampling)
        plain, _ = rig.play(requests)
        drafted, step_tokens = rig.play(requests, Told(plain, WIDTHS[-1] - 1, wrong=0.2))
        verdict = "equal" if drafted == plain else f"NOT EQUAL: {differing(drafted, plain)}"
        print(f"tiny float32, {name}: {verdict}; {step_tokens:.2f} tokens a step", flush=True)
    rig.backend.close()


def greedy(rig: Rig, draw: np.random.Generator) -> None:
    requests = requests_of(draw, 8, rig.vocab_size)
    plain, _ = rig.play(requests)
    alone: Answers = {}
    for request in requests[:4]:
        alone |= rig.play([request])[0]
    print("bf16, greedy, one stream beside 8:", differing(alone, {name: plain[name] for name in alone}))
    for width in WIDTHS:
        drafted, step_tokens = rig.play(requests, Told(plain, width - 1))
        found = f"{differing(drafted, plain)}; {step_tokens:.2f} tokens a step"
        print(f"bf16, greedy, 8 streams, {width} queries each beside plain: {found}", flush=True)


def times(rig: Rig, contexts: Sequence[int], counts: Sequence[int]) -> None:
    backend, graphs = rig.backend, rig.backend._parts.graphs
    decodes, verifies = backend._decodes, backend._verifies
    assert verifies is not None
    print(f"us a step: context, streams, plain | {', '.join(map(str, WIDTHS))} queries a stream (times plain)")
    for context in contexts:
        for streams in counts:
            rows, bucket, line = rig.open_rows(streams, context), verifies._bucket(streams), []
            decodes._send(bucket, rows)
            plain_us = median_us(partial(graphs.run, ("decode", bucket), partial(decodes._run, bucket, PLAIN)))
            for width in WIDTHS:
                verifies._send(bucket, width, rows, [Guess(width - 1)] * streams)
                work = partial(verifies._run, bucket, width, makes=False)
                found_us = median_us(partial(graphs.run, ("verify", bucket, width, False), work))
                line.append(f"{found_us:7.0f} ({found_us / plain_us:.3f})")
            print(f"{context:5d} {streams:3d} {plain_us:7.0f} |", "  ".join(line), flush=True)
            rig.close_rows(tuple(range(streams)))


def forced(rig: Rig, draw: np.random.Generator, counts: Sequence[int]) -> None:
    """What holds is drawn, whatever the model says."""
    verifies, drawn = rig.backend._verifies, np.random.default_rng(0).choice(5, DRAWN, p=DRAWN_SHARES)
    assert verifies is not None and verifies._forced is not None
    for held in (np.zeros(DRAWN, dtype=int), drawn):
        verifies._forced.copy_(torch.from_numpy(held))
        for streams in counts:
            requests = requests_of(draw, streams, rig.vocab_size, length=512, max_tokens=192)
            for name, drafting in (("plain", None), ("four drafts", Told({}, 4))):
                began_s = time.perf_counter()
                answers, step_tokens = rig.play(requests, drafting)
                took_s, total = time.perf_counter() - began_s, sum(map(len, answers.values()))
                each = f"{took_s * 1e3 * streams / total:.2f} ms a token, {step_tokens:.2f} tokens a step"
                label = f"{1 + held.mean():.2f} tokens a step forced, {streams} at once, {name}"
                print(f"{label}: {total / took_s:.0f} tok/s with prefill, {each}", flush=True)
    verifies._forced.fill_(BY_THE_MODEL)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order, whatever order they are named in")
    parser.add_argument("--streams", type=numbers, help=f"default: {STREAMS} of times, {FORCED_STREAMS} of forced")
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, help="of times (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help=f"of {BLOCK_SIZE} tokens (default: %(default)s)")
    options = parser.parse_args(arguments)
    counts, context = options.streams or STREAMS, max(options.contexts)
    if max(counts) > SIZES.max_running:
        parser.error(f"--streams: at most {SIZES.max_running} at a time")
    if "times" in options.parts and (needed := blocks_of(context, max(counts))) > options.blocks:
        parser.error(
            f"{max(counts)} streams of {context} tokens take {needed} blocks, and --blocks is {options.blocks}"
        )
    return options


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def blocks_of(context: int, streams: int) -> int:
    return streams * -(-(context + ROOM) // BLOCK_SIZE)


def main() -> None:
    options = options_of()
    parts, draw = options.parts.split(","), np.random.default_rng(3)
    if "tiny" in parts:
        tiny(options.folder, draw)
    if parts == ["tiny"]:
        return
    checkpoint, formats = random_checkpoint(options.folder, WeightKind.BF16), Formats("bf16", "bf16", "bf16", PACKED)
    own = [BY_THE_MODEL] * DRAWN
    rig = rig_of(checkpoint, SIZES, formats, block_size=BLOCK_SIZE, num_blocks=options.blocks, forced=own)
    say(rig.backend.notes[0])
    if "greedy" in parts:
        greedy(rig, draw)
    if "times" in parts:
        times(rig, options.contexts, options.streams or STREAMS)
    if "forced" in parts:
        forced(rig, draw, options.streams or FORCED_STREAMS)
    say("done")


if __name__ == "__main__":
    main()
