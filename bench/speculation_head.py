"""Which acceptance a drafting head needs on the CPU: a head with random weights, in the shape that `train-drafter`
gives it, whose drafts are made to hold at stated lengths, in turns with plain decode.

    python -m bench.speculation_head [--model smollm2] [--lengths 1.3,1.64,2,3.08] [--draft-vocab 8192] [--turns 5]
        [--tokens 160] [--max-drafts 4] [--threads 2] [--always] [--cpu-time] [--quick]

The head computes all that a trained one would. Then its guesses are replaced by the tokens of the plain answer, each
with a chance at which `--max-drafts` drafts bring the stated number of tokens a step, and by wrong ones else. How many
drafts it is asked for is up to the engine, as in service: a length that does not pay is drafted less, or not at all, so
each line ends with what came. `--always` asks for all of them in every step, whether they pay or not. What the engine
learns of one length it does not know of the next. Answers must be the plain ones."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.made_head import write_made_head
from bench.speculation import Asked, Bench, Played
from twostroke import LLM
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.speculation import expected_tokens
from twostroke.core.step import Drafts
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve
from twostroke.scheduling.plan import Drafting
from twostroke.speculation.drafter import Ask, Proposal
from twostroke.speculation.speculator import Speculator

LENGTHS = "1.3,1.64,2,3.08"
METHOD = "eagle3"


def chance_of(length: float, num_drafts: int) -> float:
    """Of each draft to hold if those before it do, so that a step brings this many tokens on average."""
    if not 1.0 <= length <= 1 + num_drafts:
        raise SystemExit(f"{num_drafts} drafts bring from 1 to {1 + num_drafts} tokens a step, and not {length}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, num_drafts) < length else (low, middle)
    return high


@dataclass
class Mended:
    """Stands before a head's own methods: its guesses hold as often as is wanted, and its time is taken."""

    head: Any
    clock: Callable[[], float]
    chance: float = 0.0
    """Of a guess to be the true token."""
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """By prompt, the plain answer."""
    propose_s: float = 0.0
    num_passes: int = 0
    """That made a guess for each stream."""
    follow_s: float = 0.0
    num_followed: int = 0

    def __post_init__(self) -> None:
        self._rng = Random(0)
        self._streams: dict[int, tuple[tuple[int, ...], int]] = {}
        self._own = {name: getattr(self.head, name) for name in ("open", "extend", "close", "propose", "follow")}
        for name in self._own:
            setattr(self.head, name, getattr(self, name))

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._streams[seq_id] = request.prompt_token_ids, len(token_ids) - len(request.prompt_token_ids)
        self._own["open"](seq_id, request, token_ids)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        prompt, count = self._streams[seq_id]
        self._streams[seq_id] = prompt, count + len(token_ids)
        self._own["extend"](seq_id, token_ids)

    def close(self, seq_id: int) -> None:
        self._streams.pop(seq_id, None)
        self._own["close"](seq_id)

    def follow(self, done: object) -> None:
        began_s = self.clock()
        self._own["follow"](done)
        self.follow_s += self.clock() - began_s
        self.num_followed += 1

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        began_s = self.clock()
        found = self._own["propose"](asks)
        self.propose_s += self.clock() - began_s
        self.num_passes += max(len(one.token_ids) for one in found)
        return [self._mended(ask.seq_id, one) for ask, one in zip(asks, found, strict=True)]

    def _mended(self, seq_id: int, own: Proposal) -> Proposal:
        prompt, count = self._streams[seq_id]
        coming = self.answers[prompt][count : count + len(own.token_ids)]
        kept = [token if self._rng.random() < self.chance else token ^ 1 for token in coming]
        return Proposal(tuple(kept), (self.chance,) * len(kept))


@dataclass
class Line:
    """What is measured of one length."""

    length: float
    plain_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_held: int = 0
    num_drafts: int = 0

    def add(self, plain: Sequence[Played], drafted: Sequence[Played]) -> None:
        self.plain_s.append(_token_s(plain))
        self.ratios.append(_token_s(plain) / _token_s(drafted))
        self.num_tokens += sum(one.num_tokens for one in drafted)
        self.num_held += sum(one.held for one in drafted)
        self.num_drafts += sum(one.drafts for one in drafted)

    def __str__(self) -> str:
        steps = max(1, self.num_tokens - self.num_held)
        return (
            f"length {self.length:4.2f}  plain {1e3 * statistics.median(self.plain_s):6.2f} ms a token; with drafts "
            f"{statistics.median(self.ratios):5.2f} x as fast ({min(self.ratios):.2f} to {max(self.ratios):.2f}); "
            f"{self.num_tokens / steps:5.2f} tokens and {self.num_drafts / steps:.2f} drafts a step"
        )


def _token_s(played: Sequence[Played]) -> float:
    return sum(one.token_s * one.num_tokens for one in played) / max(1, sum(one.num_tokens for one in played))


@dataclass
class Always(Drafting):
    """As many for every stream as there may be, with costs that nobody knows: all are computed."""

    most: int

    def drafts(self, stream: Stream, most: int) -> Drafts | None:
        asked = stream.request.sampling.speculation
        return None if asked is not None and asked.is_off else Drafts(min(most, self.most))


def measure(
    bench: Bench,
    head: Mended,
    asked: list[Asked],
    lengths: Sequence[float],
    turns: int,
    most: int,
    forget: Callable[[], None],
) -> str:
    """Each length with plain runs beside its own, in an order that changes from turn to turn. `forget`: what the engine
    has learnt of drafts."""
    for one in asked:
        (head.answers[tuple(one.prompt)],) = bench.play([one], drafts=False, salt="answers").tokens
    lines = []
    for length in lengths:
        head.chance = chance_of(length, most)
        forget()
        for one in asked:  # what is compiled, and what the engine learns first, is done before
            bench.play([one], drafts=True, salt=f"warm {length}")
        if not lines:
            head.propose_s, head.num_passes, head.follow_s, head.num_followed = 0.0, 0, 0.0, 0
        lines.append(line := Line(length))
        for turn in range(turns):
            played: dict[bool, list[Played]] = {}
            for drafts in (False, True) if turn % 2 else (True, False):
                played[drafts] = [bench.play([one], drafts=drafts, salt=f"{length} {turn}") for one in asked]
            if [one.tokens for one in played[False]] != [one.tokens for one in played[True]]:
                raise SystemExit(f"length {length}: the answers differ with drafts")
            line.add(played[False], played[True])
    passes = 1e3 * head.propose_s / max(1, head.num_passes)
    following = 1e3 * head.follow_s / max(1, head.num_followed)
    first = (
        f"head         {passes:.2f} ms a pass ({head.num_passes} of them), {following:.2f} ms a step of reading along"
    )
    return "\n".join([first, *map(str, lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default=LENGTHS, help="tokens a step that all drafts would bring, with commas")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--max-drafts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--always", action="store_true", help="draft in every step, whether it pays or not")
    parser.add_argument("--cpu-time", action="store_true", help="of this process, in place of the clock")
    parser.add_argument("--quick", action="store_true", help="one short turn, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.tokens = 1, 48
    lengths = [float(length) for length in options.lengths.split(",")]
    spec = load_checkpoint(resolve(options.model)).spec
    chosen = np.linspace(0, spec.vocab_size - 1, min(options.draft_vocab, spec.vocab_size)).astype(np.int64)
    clock = time.process_time if options.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        head = write_made_head(Path(folder) / "head", spec, chosen)
        speculate = f"{METHOD}:{head}"
        with LLM(options.model, max_context=2048, speculate=speculate, threads=options.threads) as llm:
            backend: Any = llm.engine.backend
            (drafter,) = backend.companion_drafters
            if options.always:
                llm.engine.scheduler.draft(Always(options.max_drafts))
            bench = Bench(llm, METHOD, clock, options.max_drafts)
            asked = [replace(one, max_tokens=options.tokens) for one in bench.chats()]
            mended = Mended(drafter, clock)

            def forget() -> None:
                backend.use_speculator(Speculator([drafter], spec.vocab_size))

            print(measure(bench, mended, asked, lengths, options.turns, options.max_drafts, forget), flush=True)


if __name__ == "__main__":
    main()
