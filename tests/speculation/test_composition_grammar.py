"""Grammars and drafts: what is forced is drafted and always holds, what is forbidden is never computed, looking ahead
changes nothing, and structured answers are what they are without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tests.speculation.oracle import Oracle
from tests.speculation.random_requests import GRAMMARS, Told, play
from tests.speculation.tiny import VOCAB_SIZE, Sizes, make_checkpoint, make_engine, make_tokenizer
from twostroke.core.grammar import ForeseeingMatcher, GrammarSpec
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import SpeculationParams
from twostroke.models.checkpoint import Checkpoint
from twostroke.speculation.drafter import Drafter, Proposal
from twostroke.speculation.grammar import GrammarDrafter
from twostroke.speculation.ngram import NgramDrafter
from twostroke.text import harmony
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.grammar_matcher import MAX_FORCED, GrammarMatcher
from twostroke.text.tokenizer import Tokenizer

NUM_WALKS = 12
SPECS = [
    *GRAMMARS,
    replace(GRAMMARS[0], thought="possible"),
    replace(GRAMMARS[2], thought="open"),
    replace(GRAMMARS[0], thought="harmony"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary.of(tokenizer))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def allowed_ids(matcher: ForeseeingMatcher) -> list[int]:
    mask = matcher.allowed()
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1]


def new_matcher(compiler: GrammarCompiler, spec: GrammarSpec, token_ids: Sequence[int]) -> ForeseeingMatcher:
    matcher = compiler.matcher(spec)
    assert isinstance(matcher, ForeseeingMatcher)
    for token_id in token_ids:
        matcher.advance(token_id)
    return matcher


def random_answer(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, rng: random.Random) -> list[int]:
    """A walk through the grammar to its end, or for a while; thoughts are short, and brackets deep."""
    matcher, token_ids = new_matcher(compiler, spec, ()), list[int]()
    likely = [tokenizer.encode(text)[0] for text in ("</think>", harmony.END, "<")]
    while len(token_ids) < 40:
        able = allowed_ids(matcher)
        chosen = next((one for one in likely if one in able and rng.random() < 0.3), rng.choice(able))
        token_ids.append(chosen)
        matcher.advance(chosen)
        if chosen in tokenizer.eos_token_ids:
            break
    return token_ids


def num_taken_slowly(compiler: GrammarCompiler, spec: GrammarSpec, known: list[int], guess: list[int]) -> int:
    for count in range(len(guess)):
        if guess[count] not in allowed_ids(new_matcher(compiler, spec, [*known, *guess[:count]])):
            return count
    return len(guess)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}, {spec.thought}, {spec.text[:12]}")
def test_looking_ahead(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec) -> None:
    """Against a matcher that never looks: the same masks, whatever was asked; one token where it is forced; and a walk
    token by token takes as many."""
    rng, num_forced = random.Random(4), 0
    for _ in range(NUM_WALKS):
        answer = random_answer(compiler, tokenizer, spec, rng)
        looks, plain = new_matcher(compiler, spec, ()), new_matcher(compiler, spec, ())
        for place, token_id in enumerate(answer):
            forced = list(looks.forced())
            num_forced += len(forced)
            assert answer[place : place + len(forced)] == forced[: len(answer) - place]
            guess = answer[place : place + rng.randint(0, 6)]
            if rng.random() < 0.6:
                guess.insert(rng.randint(0, len(guess)), rng.choice((rng.randrange(VOCAB_SIZE), VOCAB_SIZE - 1, 10**9)))
            taken = looks.num_taken(guess)
            if rng.random() < 0.15:
                assert taken == num_taken_slowly(compiler, spec, answer[:place], guess)
            assert looks.allowed() == plain.allowed()
            looks.advance(token_id)
            plain.advance(token_id)
    assert num_forced > 0


def test_a_long_text_is_looked_for_once(compiler: GrammarCompiler) -> None:
    """Else each of its tokens would cost as much as all that follow it."""
    text = "hello world " * 200
    matcher = compiler.matcher(GrammarSpec("choice", f'["{text}"]'))
    assert isinstance(matcher, GrammarMatcher)
    written = list[int]()
    for _ in text:
        forced = matcher.forced()
        assert forced == [*text.encode()][len(written) :][:MAX_FORCED]
        written.append(forced[0])
        matcher.advance(forced[0])
        assert len(matcher._ahead) == len(text) - len(written), "what is left was not looked for again"
    assert bytes(written).decode() == text
    assert matcher.forced() == []


def held_requests(tokenizer: Tokenizer, count: int, speculation: SpeculationParams | None = None) -> list[Request]:
    return [
        Request(
            f"r{n}",
            (n, n + 1, n + 2),
            SamplingParams(
                seed=n,
                temperature=(0.0, 0.9)[n % 2],
                max_tokens=48,
                logprobs=1,
                grammar=SPECS[n % len(SPECS)],
                logit_bias=dict.fromkeys([*tokenizer.encode("</think>"), *tokenizer.encode(harmony.END)], 3.0),
                speculation=speculation,
            ),
            eos_token_ids=tokenizer.eos_token_ids,
        )
        for n in range(count)
    ]


def play_with(
    drafters: list[Drafter] | None, checkpoint: Checkpoint, tokenizer: Tokenizer, requests: list[Request]
) -> Told:
    return play(make_engine("cpu", checkpoint, tokenizer, Sizes(num_blocks=200), drafters), requests)


@pytest.mark.parametrize("method", [None, "ngram", "grammar"])
def test_what_is_forced_is_drafted_and_holds(checkpoint: Checkpoint, tokenizer: Tokenizer, method: str | None) -> None:
    """Whichever method a request names: what a grammar forces costs nothing."""
    asked = None if method is None else SpeculationParams(method=method)
    plain = play_with(None, checkpoint, tokenizer, held_requests(tokenizer, 24))
    told = play_with([GrammarDrafter(), NgramDrafter()], checkpoint, tokenizer, held_requests(tokenizer, 24, asked))
    assert told.samples == plain.samples
    assert all(count == held for count, held in told.held["grammar"])
    assert sum(held for _, held in told.held["grammar"]) > 40
    assert method != "grammar" or "ngram" not in told.held


def test_a_request_without_drafts_has_none_of_its_grammars(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    requests = held_requests(tokenizer, 8, SpeculationParams(method="off"))
    assert not play_with([GrammarDrafter()], checkpoint, tokenizer, requests).held


@dataclass
class Forbidden(Oracle):
    """The right tokens, and behind the first few what no grammar takes."""

    name: str = "forbidden"

    def _proposal(self, seq_id: int, most: int) -> Proposal:
        token_ids = (*super()._proposal(seq_id, most).token_ids[:3], 7, 7, 7, 7)[:most]
        return Proposal(token_ids, (0.9,) * len(token_ids))


def test_what_is_forbidden_is_never_computed(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    requests = [request for request in held_requests(tokenizer, 24) if request.sampling.grammar.thought == "none"]  # type: ignore[union-attr]
    plain = play_with(None, checkpoint, tokenizer, requests)
    told = play_with([Forbidden(plain.answers(), 1.0)], checkpoint, tokenizer, requests)
    assert told.samples == plain.samples
    # An end of text holds, too, and brings no token behind it.
    assert all(held <= count <= held + 1 and count <= 3 for count, held in told.held["forbidden"])
    assert sum(held for _, held in told.held["forbidden"]) > 20
