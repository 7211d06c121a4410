"""Tokens that are drawn under a grammar while somebody drafts have the target's own distribution over what the grammar
allows: a chi-square test as that of free answers. What is allowed behind each letter is written here by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.speculation.oracle import Oracle
from tests.speculation.test_distribution import LIMIT, surprise
from tests.speculation.test_distribution_models import as_chain, logits_of
from tests.speculation.tiny import Room, Sizes, make_checkpoint, make_engine, make_tokenizer
from tests.speculation.tiny_heads import Helped, make_head
from twostroke.backends.host.host_backend import HostBackend
from twostroke.core.events import TokenEvent
from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import Head
from twostroke.models.heads.eagle3 import Eagle3Head
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.heads.mtp import MtpHead
from twostroke.speculation.drafter import ComputingDrafter, Drafter, Proposal
from twostroke.speculation.grammar import GrammarDrafter
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.suffix import SuffixDrafter
from twostroke.text.tokenizer import Tokenizer

NUM_ROUNDS = 5
GRAMMAR = GrammarSpec("regex", rf"(A[0-2]|B[3-5]x){{{NUM_ROUNDS}}}")
AFTER: Mapping[str, str] = {
    "A": "012",
    "B": "345",
    **dict.fromkeys("345", "x"),  # forced
    **dict.fromkeys("012x", "AB"),
}
LETTERS = "".join(AFTER)
NUM_STREAMS, PROMPT = 400, "A1B3xA0A2B4x"
SAMPLING = SamplingParams(temperature=1.3, max_tokens=20, grammar=GRAMMAR)
SIZES = Sizes(max_context=64, step_tokens=256, max_running=16, num_blocks=90, prefix_caching=False)


@dataclass
class Guess(Oracle):
    """Guesses letters at random, some oftener than others, most of which the grammar does not allow."""

    name: str = "guess"
    letter_ids: tuple[int, ...] = ()

    def _proposal(self, seq_id: int, most: int) -> Proposal:
        return Proposal(tuple(self._rng.choice(self.letter_ids) for _ in range(most)), (0.5,) * most)


@dataclass(frozen=True)
class Setting:
    tokenizer: Tokenizer
    chain: Checkpoint
    ids: tuple[int, ...]  # of LETTERS

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """Of each letter behind each."""
        return self.probabilities_at(SAMPLING.temperature)

    def probabilities_at(self, temperature: float) -> npt.NDArray[np.float64]:
        rows = logits_of(self.chain)[list(self.ids)][:, list(self.ids)] / temperature
        allowed = np.array([[letter in AFTER[last] for letter in LETTERS] for last in LETTERS])
        weights = np.where(allowed, np.exp(rows), 0.0)
        found: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return found

    def mended(self, head: ComputingDrafter) -> Drafter:
        """A head whose guesses become letters: else the grammar would cut them all."""
        return Helped(head, Guess({}, letter_ids=self.ids))

    def answers(self, drafters: list[Drafter] | None, model: Checkpoint | Head | None) -> tuple[list[list[int]], int]:
        """Of many streams the places of their letters, and how many drafts held."""
        room = None if drafters is None else Room(most=4)
        engine = make_engine(
            *("reference", self.chain, self.tokenizer, SIZES, drafters),
            room=room,
            draft_model=model,
            around=self.mended if isinstance(model, (Eagle3Head, MedusaHeads, MtpHead)) else lambda own: own,
        )
        prompt, texts, num_held = tuple(self.tokenizer.encode(PROMPT)), [""] * NUM_STREAMS, 0
        for seed in range(NUM_STREAMS):
            sampling = replace(SAMPLING, seed=seed)
            engine.add(Request(str(seed), prompt, sampling, eos_token_ids=self.tokenizer.eos_token_ids, seed=seed))
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    texts[int(event.request_id)] += event.text
                    num_held += event.timing.drafts_held if event.timing is not None else 0
        assert isinstance(engine.backend, HostBackend)
        if drafters is not None:
            assert engine.backend.speculator is not None
            assert engine.backend.speculator.faults == []
        engine.close()
        return [[LETTERS.index(letter) for letter in text] for text in texts], num_held


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder: Path = tmp_path_factory.mktemp("chain")
    tokenizer = make_tokenizer()
    ids = tuple(tokenizer.encode(letter)[0] for letter in LETTERS)
    return Setting(tokenizer, as_chain(make_checkpoint(folder)), ids)


@pytest.fixture(scope="module")
def plain(setting: Setting) -> list[list[int]]:
    return setting.answers(None, None)[0]


LOOKING: dict[str, Callable[[Setting], Drafter]] = {
    "grammar": lambda setting: GrammarDrafter(),
    "ngram": lambda setting: NgramDrafter(),
    "suffix": lambda setting: SuffixDrafter(),
    "guess": lambda setting: Guess({}, letter_ids=setting.ids),
}
COMPUTING: dict[str, Callable[[Setting], Checkpoint | Head]] = {
    "draft": lambda setting: setting.chain,
    "eagle3": lambda setting: make_head("eagle3", setting.chain.spec),
    "medusa": lambda setting: make_head("medusa", setting.chain.spec),
    "mtp": lambda setting: make_head("mtp", setting.chain.spec),
}


OFTEN = ("grammar", "guess", "ngram", "draft", "mtp")


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in (*LOOKING, *COMPUTING)],
)
def test_the_distribution_is_the_targets_over_what_is_allowed(
    setting: Setting, plain: list[list[int]], name: str
) -> None:
    """Each drafts beside the grammar, which drafts what it forces."""
    drafters: list[Drafter] = [GrammarDrafter()]
    if name in LOOKING and name != "grammar":
        drafters.append(LOOKING[name](setting))
    model = COMPUTING[name](setting) if name in COMPUTING else None
    found, num_held = setting.answers(drafters, model)
    assert num_held > NUM_STREAMS, "drafts held, and drafts did not"
    assert surprise(found, setting.probabilities, LETTERS.index("x")) < LIMIT
    assert found == plain


def test_the_test_can_fail(setting: Setting, plain: list[list[int]]) -> None:
    """A temperature that is a little off shows, and so does a letter that is not allowed."""
    start = LETTERS.index("x")
    assert surprise(plain, setting.probabilities, start) < LIMIT
    assert surprise(plain, setting.probabilities_at(0.75 * SAMPLING.temperature), start) > LIMIT
    with pytest.raises(AssertionError, match="what cannot be drawn was"):
        surprise([[LETTERS.index("0")]], setting.probabilities, start)
