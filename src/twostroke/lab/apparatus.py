"""What experiments measure with: an engine under a clock that is read after every step. Prompts are random and seeded,
end tokens are ignored, output lengths are exact. Knows no plot."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.cost.floor import StepWork
from twostroke.engine.build import Assembly
from twostroke.lab.adapter import EngineAdapter
from twostroke.lab.figures import percentile
from twostroke.lab.prediction import Prediction, prefill_steps
from twostroke.lab.stage import Stage, Stream
from twostroke.lab.workload import random_ids

TAIL = 0.1
WARM_STEPS = 8
"""Decode steps that are not counted: the first ones after a prompt take longer, until caches and clocks settle."""


class CannotMeasureError(TwostrokeError):
    """What this engine leaves no room or no time for, in a sentence."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time an experiment may take."""

    is_quick: bool
    repetitions: int
    point_s: float
    """A point that should take longer than this is left out; one repetition always counts, if it fits."""
    calibration_s: float = 0.0
    """For a calibration, where none is stored; 0: then there is none."""


QUICK = Effort(is_quick=True, repetitions=3, point_s=6.0, calibration_s=10.0)
THOROUGH = Effort(is_quick=False, repetitions=5, point_s=40.0, calibration_s=20.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """One quantity, several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """A tenth of the values lie below it; of few values it is the least."""
        return percentile(self.values, TAIL)

    @property
    def high(self) -> float:
        """A tenth lie above it; of few values it is the most."""
        return percentile(self.values, 1 - TAIL)

    @property
    def most(self) -> float:
        return max(self.values)

    def differs_from(self, other: Measured) -> bool:
        """Whether the bars of the two lie apart: which is larger is then no accident of this hour."""
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True, slots=True)
class Played:
    """What was seen: one entry a step in each list."""

    streams: tuple[Stream, ...]
    seconds: tuple[float, ...]
    """Of each step, from the end of the one before."""
    works: tuple[StepWork, ...]

    def steady_decodes(self, batch: int) -> list[int]:
        """Steps in which `batch` streams decode and nothing else happens, some way into such a run."""
        found: list[int] = []
        run = 0
        for index, work in enumerate(self.works):
            run = run + 1 if not work.chunks and len(work.contexts) == batch else 0
            if run > WARM_STEPS:
                found.append(index)
        return found


class Apparatus:
    def __init__(self, assembly: Assembly, prediction: Prediction, effort: Effort, seed: int = 7) -> None:
        self.assembly = assembly
        self.engine = assembly.engine
        self.shape = assembly.shape
        self.ceilings = prediction.ceilings
        self.prediction = prediction
        self.effort = effort
        config = self.engine.scheduler.config
        self.chunk_tokens = config.chunk_limit
        pool_limit = self.engine.scheduler.ledger.max_total_tokens
        self.max_tokens = config.max_context if pool_limit is None else min(config.max_context, pool_limit)
        self.max_running = config.running_limit
        self._adapter = EngineAdapter(self.engine)
        self._greedy = EngineAdapter(self.engine, temperature=0.0)
        self._vocab_size = assembly.checkpoint.spec.vocab_size
        self._draw = random.Random(seed)
        self._slowness = 1.0
        self._remembered: dict[tuple[str, int], Measured] = {}

    @property
    def pool_tokens(self) -> int:
        """What all sequences together may hold."""
        layout = self.engine.scheduler.ledger.layout
        return min(group.num_blocks for group in layout.groups) * layout.block_size

    def prompt(self, num_tokens: int) -> list[int]:
        return random_ids(num_tokens, self._vocab_size, self._draw)

    def serve_as(self, level: str) -> None:
        """The class of what is added from now on; empty: the default."""
        self._adapter.service_level = level

    def forget(self) -> None:
        self._adapter.clear_prefix()

    def warm_up(self) -> None:
        """Whatever the first steps of a kind put off: native code, graphs, caches. Longer steps only where the
        shorter ones leave time for them."""
        for length in (1, 16, 64, self.chunk_tokens, 2 * self.chunk_tokens):
            if self.fitting([length], room=8):
                self._ttft_once(length)
        self.play([self.prompt(min(16, self.max_tokens - 8)) for _ in range(min(4, self.max_running))], 8)

    def play(
        self, prompts: Iterable[Sequence[int]], out_len: int, *, each_step: Callable[[], None] | None = None
    ) -> Played:
        """All prompts at once, until everything is written. `each_step` is called between steps, off the clock."""
        return self.perform(lambda stage: [stage.add(prompt, out_len) for prompt in prompts], each_step)

    def greedy(self, prompt: Sequence[int], out_len: int) -> tuple[Stream, list[int]]:
        """One request alone, the likeliest token each time, and what it wrote."""
        self._greedy.written = {}
        played = self._perform(self._greedy, lambda stage: stage.add(prompt, out_len), None)
        [tokens] = self._greedy.written.values()
        return played.streams[0], tokens

    def perform(self, begin: Callable[[Stage], object], each_step: Callable[[], None] | None = None) -> Played:
        """`begin` adds requests, and may step; what is left is stepped to its end."""
        return self._perform(self._adapter, begin, each_step)

    def _perform(
        self, adapter: EngineAdapter, begin: Callable[[Stage], object], each_step: Callable[[], None] | None
    ) -> Played:
        adapter.take_log()
        stage = _TimedStage(adapter)
        try:
            begin(stage)
            while stage.busy():
                stage.step()
                if each_step is not None:
                    each_step()
                    stage.skip()
        except BaseException:
            adapter.abandon()
            raise
        works = tuple(adapter.take_log())
        if any(len(stream.times_s) != stream.out_len for stream in stage.streams.values()):
            raise BackendError("not every request wrote the tokens that were asked for")
        return Played(tuple(stage.streams.values()), tuple(stage.seconds), works)

    def ttft(self, prompt_len: int) -> Measured:
        """Of a prompt alone, nothing cached. Asked again, the same measurement is returned."""
        key = ("ttft", prompt_len)
        if key not in self._remembered:
            self._remembered[key] = self.repeat(lambda: self._ttft_once(prompt_len))
        return self._remembered[key]

    def _ttft_once(self, prompt_len: int) -> float:
        self.forget()
        seconds = self.play([self.prompt(prompt_len)], 1).streams[0].ttft_s
        expected_s = self.prediction.steps_s(prefill_steps(prompt_len, self.chunk_tokens))
        self._slowness = max(1.0, seconds / expected_s)
        return seconds

    def decode_steps(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Measured:
        """Seconds of the steps in which all these prompts' streams decode, and nothing else happens."""
        played = self.play(prompts, num_steps + WARM_STEPS + 1 + self.start_steps(prompts))
        steady = played.steady_decodes(len(prompts))[:num_steps]
        if not steady:
            raise CannotMeasureError(f"{len(prompts)} streams never decode together here")
        return Measured(tuple(played.seconds[index] for index in steady))

    def start_steps(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens the first of several prompts writes at most before the last has its first."""
        room = self.engine.scheduler.config.max_tokens_per_step - len(prompts)
        return -(-sum(map(len, prompts)) // max(1, room)) if len(prompts) > 1 else 0

    def decode_batch(self, batch: int, prompt_len: int, num_steps: int, *, more: bool = False) -> Measured:
        """The same of prompts with nothing in common. Asked again, the same measurement is returned, or one with
        `more` steps."""
        key = (f"decode {prompt_len} {num_steps}", batch)
        known = self._remembered.get(key)
        if known is None or more:
            self.forget()
            found = self.decode_steps([self.prompt(prompt_len) for _ in range(batch)], num_steps)
            known = found if known is None else Measured((*known.values, *found.values))
            self._remembered[key] = known
        return known

    def repeat(self, once: Callable[[], float]) -> Measured:
        """As often as the effort says, while there is time."""
        started_s, values = time.perf_counter(), [once()]
        while len(values) < self.effort.repetitions:
            if (time.perf_counter() - started_s) * (1 + 1 / len(values)) > self.effort.point_s:
                break
            values.append(once())
        return Measured(tuple(values))

    def can_afford(self, works: Iterable[StepWork]) -> bool:
        """Whether these steps fit into the time for a point, as far as is known by now how slow this machine is."""
        return self.prediction.steps_s(works) * self._slowness <= self.effort.point_s

    def fitting(self, lengths: Iterable[int], room: int = 0) -> list[int]:
        """Of prompt lengths, those that fit here with `room` tokens of answer, and can be read in the time there is."""
        return [
            length
            for length in lengths
            if length + room <= self.max_tokens and self.can_afford(prefill_steps(length, self.chunk_tokens))
        ]


class _TimedStage(Stage):
    """A stage that keeps the seconds of each step."""

    def __init__(self, adapter: EngineAdapter) -> None:
        super().__init__(adapter)
        self.seconds: list[float] = []
        self._last_s = self.clock()

    def step(self) -> None:
        super().step()
        self.seconds.append(self.ended_s - self._last_s)
        self._last_s = self.ended_s

    def skip(self) -> None:
        """What was done since the last step is not the next one's."""
        self._last_s = self.clock()
