"""Models whose layers keep states, on the reference backend and the CPU's: with prefixes found again, drafts that hold
or do not, preemption, samples and aborted neighbours, every token is the one that comes without any of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.engine.test_tiers import catch_up
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny

from twostroke import backends
from twostroke.backends.interface import BackendFactory, BackendSettings
from twostroke.config import KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts
from twostroke.core.timing import SequenceTiming
from twostroke.engine.engine import Engine
from twostroke.engine.tiers import Computed, ledger_of, make_tiers
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

HYBRIDS = (("lfm2_moe", "reference"), ("qwen3_next", "reference"), ("nemotron_h", "reference"), ("qwen3_5", "cpu"))
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
COMPUTED = Computed("float32", "rope as stored")


class Hybrid(NamedTuple):
    checkpoint: Checkpoint
    factory: BackendFactory


@pytest.fixture(scope="module", params=HYBRIDS, ids=" on ".join)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    name, backend = request.param
    folder, _ = make_tiny(name, tmp_path_factory.mktemp(name))
    return Hybrid(load_checkpoint(folder), backends.load_factory(backend))


class Guessing(Drafting):
    """Up to five drafts: the tokens that will come, as far as they are known, often with a wrong one among them."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.answers: dict[str, list[int]] = {}
        self.num_drafts = 0

    def drafts(self, sequence: Stream, most: int) -> Drafts | None:
        known = sequence.num_output
        guesses = self.answers.get(sequence.request.request_id, [])[known : known + 10]
        count = min(most, self._random.randint(0, 5))
        if not guesses or not count:
            return None
        if self._random.random() < 0.5:
            guesses[self._random.randrange(len(guesses))] ^= 1
        self.num_drafts += count
        return Drafts(count, tuple(guesses), start=len(sequence.tokens))


@dataclass
class Heard:
    """What came of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    timings: list[SequenceTiming] = field(default_factory=list)


class Small:
    """A small engine."""

    def __init__(
        self,
        hybrid: Hybrid,
        *,
        num_blocks: int = 100,
        num_states: int = 12,
        max_context: int = 1200,
        step_tokens: int = 64,
        max_running: int = 8,
        drafting: Drafting | None = None,
        kv: KVConfig | None = None,
        **config: object,
    ) -> None:
        """`kv`: with tiers."""
        checkpoint, factory = hybrid
        groups = tuple(
            KVGroup(
                one.layers, one.window, num_states if one.content == "state" else num_blocks, one.content, one.values
            )
            for one in checkpoint.spec.kv_groups()
        )
        layout = KVLayout(BLOCK_SIZE, groups)
        formats = factory.formats(checkpoint)
        assert isinstance(formats, Formats), formats
        settings = BackendSettings(max_context, step_tokens, max_running=max_running, formats=formats)
        self.backend = factory.create(checkpoint, layout, settings)
        sizes = {"max_tokens_per_step": step_tokens, "max_running": max_running, "snapshot_tokens": BLOCK_SIZE}
        scheduler_config = SchedulerConfig(max_context=max_context, **{**sizes, **config})  # type: ignore[arg-type]
        tiers = None
        if kv is not None:
            tiers, _ = make_tiers(kv, layout, checkpoint, self.backend, lambda start, count: 1.0, COMPUTED)
        ledger = ledger_of(scheduler_config, layout, tiers)
        scheduler = Scheduler(scheduler_config, layout, ledger=ledger, drafting=drafting, policy="fifo")
        self.engine = Engine(scheduler, self.backend, checkpoint.spec.vocab_size)
        self.heard: dict[str, Heard] = {}

    def __enter__(self) -> Small:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> None:
        self.heard[name] = Heard({sample: [] for sample in range(sampling.n)})
        self.engine.add(Request(name, tuple(prompt), sampling))

    def turn(self) -> None:
        for event in self.engine.step():
            if isinstance(event, TokenEvent):
                heard = self.heard[event.request_id]
                heard.tokens[event.sample_index] += event.token_ids
                heard.timings += [] if event.timing is None else [event.timing]
        catch_up(self.engine)

    def run(self) -> None:
        while self.engine.busy:
            self.turn()
        self.engine.scheduler.check()

    def ask(self, name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> list[int]:
        self.add(name, prompt, sampling)
        self.run()
        return self.heard[name].tokens[0]


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, VOCAB_SIZE) for _ in range(count)]


def conversation(num_turns: int, tool_tokens: tuple[int, int], seed: int = 3) -> Iterator[tuple[int, list[int], int]]:
    """Of each turn: what is said, or comes from a tool, and how many tokens the answer has. Every fifth turn the
    client leaves the last answer's first tokens out, as templates do with what a model thought."""
    draw = random.Random(seed)
    for turn in range(num_turns):
        yield turn, words(turn, draw.randint(*tool_tokens)), 5 if turn % 5 == 4 else 0


def talk(
    hybrid: Hybrid, num_turns: int, tool_tokens: tuple[int, int], max_context: int, step_tokens: int = 64
) -> tuple[int, int]:
    """Both ways. Returns the tokens that were found again, and those that were drafted."""
    guessing, system = Guessing(), words(99, 50)
    blocks = -(-max_context // BLOCK_SIZE)
    sizes = {"num_blocks": 2 * blocks, "max_context": max_context, "max_running": 2, "step_tokens": step_tokens}
    found = 0
    with (
        Small(hybrid, prefix_caching=False, **sizes) as plain,  # type: ignore[arg-type]
        Small(hybrid, drafting=guessing, **sizes) as quick,  # type: ignore[arg-type]
    ):
        prompt = system
        for turn, said, num_left_out in conversation(num_turns, tool_tokens):
            prompt = prompt + said
            answer = plain.ask(str(turn), prompt)
            guessing.answers = {str(turn): answer}
            assert quick.ask(str(turn), prompt) == answer, turn
            found += quick.heard[str(turn)].timings[0].cached_tokens
            prompt = prompt + answer[num_left_out:]
        assert plain.engine.scheduler.counts().prefix_hit_tokens == 0
    return found, guessing.num_drafts


def test_a_conversation_with_tools(hybrid: Hybrid) -> None:
    found, drafted = talk(hybrid, 12, (3, 20), max_context=700)
    assert found > 12 * 50 and drafted > 100


@pytest.mark.slow
def test_a_long_conversation_with_tools(hybrid: Hybrid) -> None:
    """40 turns; 20,000 tokens where they are read fast enough to be read forty times."""
    tool_tokens, max_context = ((400, 520), 22_000) if hybrid.factory.name == "cpu" else ((60, 90), 4_500)
    found, drafted = talk(hybrid, 40, tool_tokens, max_context, step_tokens=512)
    assert found > 40 * max_context // 3 and drafted > 400


def test_a_turn_finds_the_answer_before_it(hybrid: Hybrid) -> None:
    """Snapshots are taken in answers, too, though drafts make it uncertain which step comes to a block's end."""
    guessing = Guessing(1)
    prompt = words(1, 21)
    with Small(hybrid, prefix_caching=False) as plain:
        answer = plain.ask("0", prompt)
        follows = [*prompt, *answer, *words(2, 4)]
        expected = plain.ask("1", follows)
    for drafting in (None, guessing):
        with Small(hybrid, drafting=drafting) as quick:
            guessing.answers = {"0": answer, "1": expected}
            assert quick.ask("0", prompt) == answer
            assert quick.ask("1", follows) == expected
            cached = quick.heard["1"].timings[0].cached_tokens
            assert cached == (len(prompt) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert guessing.num_drafts > 10


@pytest.mark.parametrize("num_states", [3, 8])
def test_company_preemption_samples_and_aborts(hybrid: Hybrid, num_states: int) -> None:
    prompts = {name: [*words(7, 30), *words(20 + number, 12)] for number, name in enumerate("abcdef")}
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=16, n=3, ignore_eos=True)
    alone: dict[str, dict[int, list[int]]] = {}
    for name, prompt in prompts.items():
        with Small(hybrid, prefix_caching=False) as plain:
            plain.ask(name, prompt, seeded if name == "c" else GREEDY)
            alone[name] = plain.heard[name].tokens
    guessing = Guessing(2)
    guessing.answers = {name: list(tokens[0]) for name, tokens in alone.items() if name != "c"}
    with Small(hybrid, num_blocks=9, num_states=num_states, max_running=4, drafting=guessing) as busy:
        for number, (name, prompt) in enumerate(prompts.items()):
            busy.add(name, prompt, seeded if name == "c" else GREEDY)
            for _ in range(number):
                busy.turn()
        busy.engine.abort("e")
        busy.run()
        for name, expected in alone.items():
            if name != "e":
                assert busy.heard[name].tokens == expected, name
        counts = busy.engine.scheduler.counts()
        assert counts.preemptions > 0 and counts.prefix_hit_tokens > 0
        for name, prompt in prompts.items():  # and all again, from what is left
            busy.ask(f"{name} again", prompt, seeded if name == "c" else GREEDY)
            assert busy.heard[f"{name} again"].tokens == alone[name]


def test_states_come_back_from_host_memory_and_from_disk(
    hybrid: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worth, "may_spill", lambda *_: True)  # these models read faster than anything is copied
    turns = [(f"{talk}.{turn}", talk, words(10 * talk + turn, 25)) for turn in range(3) for talk in range(4)]
    expected, prompts, said = {}, {}, {talk: list[int]() for talk in range(4)}
    with Small(hybrid, prefix_caching=False) as plain:
        for name, talk, new in turns:
            said[talk] += new
            prompts[name] = tuple(said[talk])
            expected[name] = plain.ask(name, prompts[name])
            said[talk] += expected[name]
    kv = KVConfig(host_gb=0.05, disk=str(tmp_path / "kv"), disk_gb=0.2)
    found = []
    for _ in range(2):  # the second time after a restart
        with Small(hybrid, num_blocks=14, num_states=3, max_context=200, kv=kv) as small:
            for name, prompt in prompts.items():
                assert small.ask(name, prompt) == expected[name], name
            timings = [heard.timings[0] for heard in small.heard.values()]
            found.append((sum(one.tier_tokens.host for one in timings), sum(one.tier_tokens.disk for one in timings)))
    assert found[0][0] > 100 and found[1][1] > 100, found
