"""KV beyond the device, measured on this machine: `python -m bench.kv_tiers`.

A conversation of 8 turns comes back when the device has forgotten it: its time to first token from host memory, from
disk after a restart, and computed again, with the same tokens each time. Then decode with tiers that nobody hits,
beside decode without, in short turns. Then what loading and fetching reach of the rates of memory and disk.

On a card, with random weights of a shape and a conversation of 16k tokens (tokens may differ there where two are about
as likely: a prompt is computed in other batches each time):

    python -m bench.kv_tiers --model bench/shapes/llama-3.1-8b --backend cuda --load random --history 16384 \\
        --repeats 2 --host-gb 8 --streams 8 --rounds 12"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from bench.kv_tier_rates import drop_cached_pages, rates
from bench.watching import balanced_orders, median_interval
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.engine.build import Assembly, assemble, prepare
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.resolve import resolve
from twostroke.models.weights.tensor import WeightKind

ANSWER = 16
"""Tokens of each answer."""


@dataclass
class Answer:
    tokens: list[int]
    timing: SequenceTiming


class Players:
    """Engines over one model, and the requests that they are given."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        context: int,
        folder: Path,
        seed: int,
        *,
        backend: str = "auto",
        host_gb: float | None = None,
    ) -> None:
        """`host_gb`: instead of what each part of this script takes."""
        self._checkpoint, self._context, self.folder, self._backend = checkpoint, context, folder, backend
        self._host_gb = host_gb
        prepared = prepare(checkpoint, EngineConfig(backend=backend, max_context=context))
        self._num_tokens = checkpoint.spec.vocab_size
        self.is_on_card = prepared.factory.name == "cuda"
        resolved = prepared.resolved
        positions = sum(resolved.layout.positions(group) for group in resolved.layout.groups)
        self._kv_bytes = int(resolved.kv_bytes / positions * (context + max(64, 2 * resolved.layout.block_size)))
        self._random = random.Random(seed)
        self._count = 0

    def engine(self, *, host_gb: float | None = None, disk: bool = False) -> Assembly:
        """Its KV has room for one context alone, so that the next prompt takes the last one's."""
        host_gb = host_gb and (self._host_gb or host_gb)
        kv = KVConfig(memory_bytes=self._kv_bytes, host_gb=host_gb, disk=str(self.folder) if disk else None)
        config = EngineConfig(backend=self._backend, max_context=self._context, speculate="off", kv=kv)
        return assemble(self._checkpoint, None, config)

    def give_back(self) -> None:
        """On a card, the memory of engines that nobody has any more."""
        gc.collect()
        if self.is_on_card:
            import torch

            torch.cuda.empty_cache()

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._num_tokens // 4, self._num_tokens) for _ in range(count)]

    def ask(self, engine: Engine, prompt: list[int], max_tokens: int = ANSWER) -> Answer:
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(Request(f"r{self._count}", tuple(prompt), sampling))
        tokens: list[int] = []
        timing = None
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    tokens += event.token_ids
                    timing = event.timing or timing
        assert timing is not None
        return Answer(tokens, timing)

    def forget(self, engine: Engine) -> None:
        """Fill the device with something else."""
        self.ask(engine, self.tokens(self._context - 2), 1)


def conversation(players: Players, engine: Engine, history: int, turns: int) -> list[int]:
    """Until it has about so many tokens; returns what its next turn asks."""
    prompt = players.tokens(history - turns * (ANSWER + 40))
    for _ in range(turns):
        prompt += players.tokens(40)
        prompt += players.ask(engine, prompt).tokens
    return prompt + players.tokens(20)


def returns(players: Players, history: int, turns: int, repeats: int) -> None:
    plain = players.engine().engine
    first = players.engine(host_gb=1.0, disk=True).engine
    prompt = conversation(players, first, history, turns)
    players.forget(first)
    ways: dict[str, list[Answer]] = {"computed again": [], "host memory": [], "disk, from its cache": [], "disk": []}
    for _ in range(repeats):
        ways["computed again"].append(players.ask(plain, prompt))
        plain.clear_prefixes()
        ways["host memory"].append(players.ask(first, prompt))
        players.forget(first)
    first.close()
    del first
    players.give_back()
    for name, ready in (("disk, from its cache", lambda folder: None), ("disk", drop_cached_pages)):
        for _ in range(repeats):
            ready(players.folder)
            again = players.engine(host_gb=1.0, disk=True).engine
            ways[name].append(players.ask(again, prompt))
            again.close()
            del again
            players.give_back()
    plain.close()
    base = median(answer.timing.ttft_s or 0.0 for answer in ways["computed again"])
    print(f"a conversation of {turns} turns and {len(prompt)} tokens comes back: time to first token")
    for name, answers in ways.items():
        ttft_s = median(answer.timing.ttft_s or 0.0 for answer in answers)
        cached, tiers = answers[-1].timing.cached_tokens, answers[-1].timing.tier_tokens
        print(
            f"  {name:22} {ttft_s * 1e3:8.1f} ms  {base / ttft_s:5.1f} x   cached {cached:5} "
            f"(host {tiers.host}, disk {tiers.disk})"
        )
    told = {tuple(answer.tokens) for answers in ways.values() for answer in answers}
    print("  the same tokens each time" if len(told) == 1 else f"  DIFFERENT TOKENS: {len(told)} answers")


class StepClock:
    """From one step of decodes to the next, copies and all."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds, self._last_s = seconds, 0.0

    def __call__(self, step: Step, result: StepResult) -> None:
        now_s, last_s = time.perf_counter(), self._last_s
        self._last_s = 0.0 if step.prefills else now_s
        if last_s and not step.prefills:
            self._seconds.append(now_s - last_s)


@dataclass
class Side:
    """One that takes part in decoding, round after round."""

    name: str
    engine: Engine
    steps_s: list[float] = field(default_factory=list)
    """The median step of each of its turns."""

    def play(self, prompts: list[list[int]], num_tokens: int, salt: str) -> None:
        seconds: list[float] = []
        self.engine.on_step = StepClock(seconds)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            self.engine.add(Request(f"{salt}.{number}", tuple(prompt), sampling, cache_salt=f"{salt}.{number}"))
        while self.engine.busy:
            self.engine.step()
        self.steps_s.append(median(seconds))


def decode_beside(players: Players, rounds: int, streams: int, num_tokens: int) -> None:
    """Streams that fill the device again and again: with tiers each block that goes is spilled, and none comes back.
    In short turns, in every order alike; each turn is held against those without tiers of the same round. The engine
    without takes part twice: how far its two turns lie apart is the noise."""
    without = players.engine().engine
    sides = [
        Side("without tiers", without),
        Side("without tiers again", without),
        Side("host memory", players.engine(host_gb=0.5).engine),
        Side("host memory and disk", players.engine(host_gb=0.5, disk=True).engine),
    ]
    for side in sides[1:]:
        players.forget(side.engine)
    for number, order in zip(range(-1, rounds), balanced_orders(len(sides)), strict=False):
        prompts = [players.tokens(100) for _ in range(streams)]
        for place in order:
            sides[place].play(prompts, num_tokens, f"d{number}.{place}")
    for side in sides:
        del side.steps_s[0]  # a round to warm up
    base = [fmean(both) for both in zip(sides[0].steps_s, sides[1].steps_s, strict=True)]
    print(f"decode of {streams} streams, nothing hit, {rounds} rounds: the median step, and how much longer it is than")
    print("without tiers in the same round, with where that lies with 95% certainty")
    for side in sides:
        _say_side(side, sides[0].steps_s if side is sides[1] else base)
    for engine in {id(side.engine): side.engine for side in sides}.values():
        engine.close()


def _say_side(side: Side, base: list[float]) -> None:
    longer = [ours / theirs - 1 for ours, theirs in zip(side.steps_s, base, strict=True)]
    low, high = median_interval(longer)
    tiers = side.engine.scheduler.counts().tiers
    moved = "" if tiers is None else f"  {tiers.totals.spilled_blocks} spilled, {tiers.totals.dropped_blocks} dropped"
    found = f"{median(longer):+.2%} [{low:+.2%}, {high:+.2%}]"
    print(f"  {side.name:22} {median(side.steps_s) * 1e3:8.3f} ms  {found}{moved}")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--load", choices=("file", "random"), default="file", help="random: of a folder's config.json")
    parser.add_argument("--host-gb", type=float, help="host memory for KV; default: 1, and 0.5 beside decode")
    parser.add_argument("--history", type=int, default=3000, help="tokens of the conversation when it comes back")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60, help="of decoding; each side has a turn in every one")
    parser.add_argument("--tokens", type=int, default=60, help="that each stream decodes in a turn")
    parser.add_argument("--parts", default="returns,decode,rates")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options_of(arguments)
    if asked.load == "random":
        checkpoint = random_checkpoint(Path(asked.model), WeightKind.BF16)
    else:
        checkpoint = load_checkpoint(resolve(asked.model), name=asked.model)
    with tempfile.TemporaryDirectory(prefix="kv-tiers-") as folder:
        kv, backend, host_gb = Path(folder) / "kv", asked.backend, asked.host_gb
        players = Players(checkpoint, asked.history + 200, kv, seed=1, backend=backend, host_gb=host_gb)
        if "returns" in asked.parts:
            returns(players, asked.history, asked.turns, asked.repeats)
        if "decode" in asked.parts:
            decode_beside(players, asked.rounds, asked.streams, asked.tokens)
        if "rates" in asked.parts:
            rates(players.engine(host_gb=1.0, disk=True), players.folder, asked.history)


if __name__ == "__main__":
    main()
