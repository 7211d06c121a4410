"""Real drafters beside layers that keep states: lookup, a smaller model and an EAGLE-3 head. Answers are those without
drafts, on both host backends, in chunks and behind prefixes that are found again; and what is proposed is what it would
be of the whole text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.heads.published import PublishedHead
from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.hybrids import Mended, answers_of, llm_of, num_drafts, short_prefixes
from tests.speculation.test_heads import GREEDY, PROMPTS, SAMPLING, Listener, tokens
from tests.speculation.test_heads import Made as MadeHead
from tests.speculation.test_heads import published_chain as head_chain
from twostroke import LLM

pytestmark = pytest.mark.usefixtures(short_prefixes.__name__)
MODELS = ("lfm2", "qwen3_5", "granite_hybrid_dense")
GRANITE_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
REPEATING = [*PROMPTS[:2], [7, 8, 9, 10, 11, 12] * 6]


@dataclass
class Made:
    name: str
    folder: Path
    model: Any
    small: Any
    """The smaller model, as transformers runs it."""
    head: PublishedHead
    methods: dict[str, str]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    layers = {"num_hidden_layers": 4, "layer_types": GRANITE_LAYERS} if "granite" in request.param else {}
    folder, model = make_tiny(request.param, tmp_path_factory.mktemp("target"), **layers)
    small, small_model = make_tiny("llama", tmp_path_factory.mktemp("small"), num_hidden_layers=1)
    torch.manual_seed(5)
    head = PublishedHead(norm_before_residual=True)
    with torch.no_grad():
        head.lm_head.weight *= 4
    saved = head.save(tmp_path_factory.mktemp("eagle3"))
    methods = {"auto": "auto", "suffix": "suffix", "draft": f"draft:{small}", "eagle3": f"eagle3:{saved}"}
    return Made(request.param, folder, model, small_model, head, methods)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_answers_are_those_without_drafts(made: Made, backend: str) -> None:
    """Greedy, drawn and seeded, several answers, logprobs; the second time prefixes are found again."""
    with llm_of(made.folder, backend, "off") as llm:
        plain = llm.generate(REPEATING, SAMPLING)
    for method, speculate in made.methods.items():
        with llm_of(made.folder, backend, speculate) as llm:
            drafters = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
            for drafter in drafters:
                Mended(drafter, answers_of(REPEATING, plain))
            for _ in range(2):
                drafted = llm.generate(REPEATING, SAMPLING)
                assert tokens(drafted) == tokens(plain), method
                assert llm.engine.backend.speculator.faults == [], method  # type: ignore[attr-defined]
                llm.engine.scheduler.check()
            assert drafted[0].samples[0].timing.cached_tokens > 0, method
            computed, held = num_drafts(drafted)
            assert computed >= 20 * bool(drafters) and held >= 10 * bool(drafters), method


def test_a_smaller_models_guesses_are_those_of_the_whole_text(made: Made) -> None:
    with llm_of(made.folder, "reference", made.methods["draft"]) as llm:
        check_smaller_model(made, llm)


def check_smaller_model(made: Made, llm: LLM) -> None:
    drafter: Any = llm.engine.backend.companion_drafters[0]  # type: ignore[attr-defined]
    heard, propose = [], drafter.propose

    def listen(asks: Any) -> Any:
        known = [tuple(drafter._rows[ask.seq_id].tokens) for ask in asks]
        found = propose(asks)
        heard.extend(zip(known, found, strict=True))
        return found

    drafter.propose = listen
    for _ in range(2):
        llm.generate(PROMPTS, replace(GREEDY, max_tokens=8))
    assert len(heard) >= 12
    for known, proposal in heard:
        entered = list(known)
        with torch.no_grad():
            for token in proposal.token_ids:
                read = made.small(input_ids=torch.tensor([entered]), use_cache=False)
                entered.append(int(read.logits[0, -1].argmax()))
                assert token == entered[-1]


def test_a_heads_guesses_are_those_of_the_whole_text(made: Made) -> None:
    with llm_of(made.folder, "reference", made.methods["eagle3"]) as llm:
        listener = Listener(llm.engine.backend.companion_drafters[0])  # type: ignore[attr-defined]
        for _ in range(2):
            llm.generate(PROMPTS, replace(GREEDY, max_tokens=8))
    heard = [one for one in listener.heard if one[1]]
    assert len(heard) == len(listener.heard) >= 12  # nobody's slots were lost
    published = MadeHead(made.name, made.folder, made.model, made.head, {})
    for known, most, proposal in heard:
        assert list(proposal.token_ids) == head_chain(published, known, most)
