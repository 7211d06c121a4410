"""Heads draft: answers are those without them; and what a head proposes inside an engine, in every way that a stream
can take, is what the published order of its arithmetic gives for the whole text from the beginning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.heads.published import DRAFT_VOCAB_SIZE, VOCAB_SIZE, PublishedHead, medusa_tensors
from tests.models.tiny_checkpoints import make_tiny
from twostroke import LLM, SamplingParams
from twostroke.backends.host.head_drafter import LEAST_SURVIVAL, MedusaDrafter
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError, ModelError
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.step import Drafts, Step
from twostroke.engine.build import assemble
from twostroke.engine.offline import GenerationResult
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.plan import Drafting
from twostroke.speculation import guard
from twostroke.speculation.drafter import Ask, Proposal
from twostroke.speculation.trust import FEW_TRIALS, TRIALS, Trust

BACKENDS = ("reference", "cpu")
MODELS = ("llama", "mistral")
"""The second has windows of 16 tokens."""
CONFIG = EngineConfig(threads=1, max_context=160, quantise="none", kv=KVConfig(memory_bytes=4 << 20))
WAYS = {
    "plain": CONFIG,
    "chunked": replace(CONFIG, max_tokens_per_step=24),
    "step by step": replace(CONFIG, run_ahead=False),
    "little KV": replace(CONFIG, max_context=96, policy="fifo"),  # who gives way is not the clock's affair
}
LITTLE_KV_BYTES = {"llama": 150_000, "mistral": 300_000}
"""Two of the longer prompts and their answers do not fit side by side."""
LIKE_PUBLISHED = 0.7
"""Of first guesses by native code, at least: chance would bring one in a hundred."""
LONGER = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
MOST_ROUNDS = 80
"""Of answers, until a head is doubted that sits out most steps: some thousand steps."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True, repetition_penalty=1.1)
SAMPLING = [GREEDY, replace(SEEDED, n=2), replace(SEEDED, logprobs=2, seed=3)]
PROMPTS = [
    [3 + (17 * place) % 240 for place in range(50)],
    [5, 9, 5, 9, 5],
    [3 + (31 * place) % 250 for place in range(37)],
]


@dataclass
class Room(Drafting):
    """Room for this many drafts in turn, whether they pay or not."""

    turns: tuple[int, ...] = (3, 0, 4, 1, 0, 0, 2)

    def __post_init__(self) -> None:
        self._turns = cycle(self.turns)

    def drafts(self, sequence: Stream, most: int) -> Drafts | None:
        asked = sequence.request.sampling.speculation
        most = min(most, next(self._turns))
        return Drafts(most) if most > 0 and (asked is None or not asked.is_off) else None


@dataclass
class Made:
    """A target as transformers runs it, with heads for it."""

    name: str
    folder: Path
    model: Any
    head: PublishedHead
    heads: dict[str, str]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, model = make_tiny(request.param, tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    torch.manual_seed(5)
    head = PublishedHead(norm_before_residual=True)
    with torch.no_grad():
        head.lm_head.weight *= 4  # guesses that are sure of themselves: a chain goes on
    eagle3, medusa = tmp_path_factory.mktemp("eagle3"), tmp_path_factory.mktemp("medusa")
    head.save(eagle3)
    (medusa / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    save_file(medusa_tensors(3, 1, False), medusa / "medusa_lm_head.safetensors")
    return Made(request.param, folder, model, head, {"eagle3": f"eagle3:{eagle3}", "medusa": f"medusa:{medusa}"})


MakeLLM = Callable[..., LLM]


@pytest.fixture(params=BACKENDS)
def make_llm(request: pytest.FixtureRequest, made: Made) -> Iterator[MakeLLM]:
    opened: list[LLM] = []

    def make(speculate: str, way: EngineConfig = CONFIG, *, rooms: bool = True) -> LLM:
        """Without `rooms` the engine decides by its own costs whether drafts pay."""
        kind = {"quantise": None} if request.param == "reference" else {}
        if way is WAYS["little KV"]:
            way = replace(way, kv=KVConfig(memory_bytes=LITTLE_KV_BYTES[made.name]))
        config = replace(way, backend=request.param, speculate=speculate, **kind)
        llm = LLM.from_assembly(assemble(load_checkpoint(made.folder), None, config))
        opened.append(llm)
        if speculate != "off" and rooms:
            llm.engine.scheduler.draft(Room())
        return llm

    yield make
    for llm in opened:
        llm.close()


def tokens(results: list[GenerationResult]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in result.samples] for result in results]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_answers_are_those_without_a_head(made: Made, make_llm: MakeLLM, method: str, way: str) -> None:
    plain = make_llm("off", WAYS[way]).generate(PROMPTS, SAMPLING)
    llm = make_llm(made.heads[method], WAYS[way])
    for _ in range(2):  # the second time prompts are found again
        drafted = llm.generate(PROMPTS, SAMPLING)
        assert tokens(drafted) == tokens(plain)
        assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]
        assert sum(sample.timing.drafts_computed for one in drafted for sample in one.samples) >= 20
        llm.engine.scheduler.check()


@dataclass
class Listener:
    """Between a speculator and a head: what was known of a stream, and what was proposed."""

    drafter: Any

    def __post_init__(self) -> None:
        self.heard: list[tuple[tuple[int, ...], int, Proposal]] = []
        self._propose = self.drafter.propose
        self.drafter.propose = self.propose

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found: list[Proposal] = self._propose(asks)
        for (seq_id, most), proposal in zip(asks, found, strict=True):
            first = self.drafter._followed[seq_id].first
            known = tuple(self.drafter._rows[seq_id].tokens)
            self.heard.append((known, most if first == 1 else 0, proposal))
        return found


def published_chain(made: Made, known: tuple[int, ...], most: int) -> list[int]:
    """What the head guesses behind these tokens: hidden states by transformers, the whole text at once."""
    with torch.no_grad():
        read = made.model(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
        joined = made.head.join(torch.cat([read.hidden_states[tap][0] for tap in (1, 2, 3)], dim=-1))
        embedding = made.model.get_input_embeddings().weight
        states, entered, guesses, survival = list(joined), list(known[1:]), [], 1.0
        while len(guesses) < most and survival >= LEAST_SURVIVAL:
            hidden, scores = made.head(embedding[torch.tensor(entered)], torch.stack(states))
            best = int(scores[-1].argmax())
            survival *= float(scores[-1].softmax(dim=-1)[best])
            states.append(hidden[-1])
            entered.append(int(made.head.target_ids[best]))
            guesses.append(entered[-1])
    return guesses


@pytest.mark.parametrize("way", ["plain", "chunked", "little KV"])
def test_what_is_proposed_is_what_the_whole_text_gives(made: Made, make_llm: MakeLLM, way: str) -> None:
    llm = make_llm(made.heads["eagle3"], WAYS[way])
    listener = Listener(llm.engine.backend.companion_drafters[0])  # type: ignore[attr-defined]
    sampling = [replace(GREEDY, max_tokens=12)] * len(PROMPTS)
    for _ in range(2):
        results = llm.generate(PROMPTS, sampling)
    least_cached = 16 if way == "little KV" else 32  # others took some of its blocks
    assert results[0].samples[0].timing.cached_tokens >= least_cached
    heard = [one for one in listener.heard if one[1]]
    assert len(heard) == len(listener.heard) >= 30  # nobody's slots were lost
    chains = [(list(proposal.token_ids), published_chain(made, known, most)) for known, most, proposal in heard]
    if llm.assembly.backend_name == "reference":
        assert all(found == expected for found, expected in chains)
    else:  # matrices in 8 bits, and a key of zeros: of guesses that are nearly equal, another may be first
        assert np.mean([found[0] == expected[0] for found, expected in chains]) >= LIKE_PUBLISHED
    assert max(len(proposal.token_ids) for _, _, proposal in heard) >= 2


def test_a_stream_whose_slots_were_never_written_is_drafted_for(made: Made, make_llm: MakeLLM) -> None:
    """Its prompt was read for a request without drafts: the head begins behind it."""
    llm = make_llm(made.heads["eagle3"])
    llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=2, speculation=NO_DRAFTS))
    listener = Listener(llm.engine.backend.companion_drafters[0])  # type: ignore[attr-defined]
    plain = make_llm("off").generate(PROMPTS[:1], GREEDY)
    drafted = llm.generate(PROMPTS[:1], GREEDY)
    assert tokens(drafted) == tokens(plain)
    assert drafted[0].samples[0].timing.cached_tokens == 48
    assert any(proposal.token_ids for _, _, proposal in listener.heard)
    if llm.assembly.backend_name == "reference":  # native code blanks them
        assert all(most == 0 for _, most, _ in listener.heard)
    assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]


def test_medusa_says_nothing_of_what_it_did_not_follow() -> None:
    """Its guesses would be of another place."""
    network: Any = SimpleNamespace(scores=lambda normed, most: [np.eye(4, dtype=np.float32)[[2]]] * most)
    one = np.ones(8, np.float32)
    drafter = MedusaDrafter(network, source="heads", target_ids=np.arange(4), final_norm=one, norm_eps=1e-6)
    drafter.open(0, Request("r", (1, 2)), (1, 2))
    step = Step(0)
    done: Any = SimpleNamespace(
        scores=SimpleNamespace(last_hidden=one[None]), step=step, logit_rows=lambda: {0: range(1)}
    )

    def drafted(*, follows: bool) -> tuple[int, ...]:
        drafter.extend(0, [3])
        if follows:
            drafter.follow(done)
        drafter.begin(step)
        return drafter.propose([Ask(0, 2)])[0].token_ids

    assert [drafted(follows=follows) for follows in (True, False, True)] == [(2, 2), (), (2, 2)]
    drafter.begin(step)
    assert drafter.propose([Ask(0, 1)])[0].token_ids == (2,), "no token came meanwhile"


def test_a_head_of_another_model_is_refused(made: Made, make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="belongs to another model: its vocabulary is 512"):
        make_llm(f"eagle3:{made.head.save(tmp_path / 'foreign', vocab_size=512)}")
    with pytest.raises(ModelError, match="there is no EAGLE-3 head at"):
        make_llm(f"eagle3:{tmp_path / 'nowhere'}")
    with pytest.raises(BadRequestError, match="has no MTP blocks"):
        make_llm("mtp")


def test_a_head_that_is_never_right_is_doubted(
    made: Made, make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its first guesses, whether they were computed or not; once. Nobody makes room for it here: the engine decides
    by its own costs whom to ask. Its vocabulary has no token that the model says, so it is never right by chance.
    Whatever it does takes 10 us here: beside a model this small it takes longer than a step, and is seldom asked."""
    calls = count()
    monkeypatch.setattr(guard, "time", SimpleNamespace(perf_counter=lambda: 1e-5 * next(calls)))
    said = set(np.concatenate([one.samples[0].token_ids for one in make_llm("off").generate(PROMPTS, LONGER)]).tolist())
    head = copy(made.head)
    head.target_ids = torch.tensor([token for token in range(VOCAB_SIZE) if token not in said][:DRAFT_VOCAB_SIZE])
    llm = make_llm(f"eagle3:{head.save(tmp_path / 'foreign')}", rooms=False)
    doubts: list[str] = llm.engine.backend.speculator.doubts  # type: ignore[attr-defined]
    for _ in range(MOST_ROUNDS):
        llm.generate(PROMPTS, LONGER)
        if doubts:
            break
    assert len(doubts) == 1 and "foreign hardly ever guesses right (0 of " in doubts[0]
    llm.generate(PROMPTS, LONGER)
    assert len(doubts) == 1


def test_trust_counts_first_guesses() -> None:
    trust = Trust()
    trust.learn(True)
    trust.learn(False)
    assert (trust.num_tried, trust.num_right) == (2, 1)
    assert trust.doubt("h") is None
    trust.num_tried, trust.num_right = FEW_TRIALS - 1, 0
    assert trust.doubt("h") is None
    trust.learn(False)
    assert "h hardly ever guesses right (0 of 40 first drafts)" in str(trust.doubt("h"))
    assert trust.is_open, "one that is right after all may take it back"
    trust.learn(True)
    assert trust.doubt("h") is None
    trust.num_tried, trust.num_right = TRIALS, TRIALS // 40
    assert trust.doubt("h") is None
    trust.num_right = TRIALS // 100
    assert "h hardly ever guesses right (4 of 400 first drafts)" in str(trust.doubt("h"))
    assert not trust.is_open
