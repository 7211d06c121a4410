"""Several ranks on cards hold one model together: greedy tokens of two and three are one rank's. In the interpreter, in
float32, over gloo; what only a card can show is in `test_ranks_on_card.py`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, play, request
from tests.backends.cuda.float_ranks import FACTORY, FloatRanks
from tests.backends.cuda.letters import JSON, grammars, held
from tests.backends.cuda.test_families import QUICK, SMALL, tiny
from tests.backends.cuda.thread_ranks import card_ranks

from twostroke.backends.cuda import FACTORY as CUDA
from twostroke.backends.cuda.kernels.rank_rows import keep_held, take_tokens
from twostroke.backends.cuda.kernels.sampling_state import NUM_OUTPUT, NUM_WORDS
from twostroke.backends.cuda.ranks import GlooTransport
from twostroke.backends.interface import BackendSettings, CardPlace, CardRanksFactory, CardRoom, RankedFactory
from twostroke.backends.sharded.card_backend import CardBackend
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import Formats
from twostroke.engine.drafting import speculation
from twostroke.engine.engine import Engine
from twostroke.machine import detect
from twostroke.models.checkpoint import Checkpoint
from twostroke.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's, on a host")

FAMILIES = [
    ("llama", 3),  # uneven heads
    ("llama_bias", 2),  # one KV head that both hold
    ("gpt_oss", 3),  # experts with biases, windows and sinks
    ("deepseek_v2_lite", 2),  # latents
    ("nemotron_h_latent", 2),  # states, and experts that read fewer numbers
]
OTHERS = [
    *((name, 2) for name in ("gemma3", "gemma4", "gemma4_moe", "qwen2_moe", "qwen3_moe_mixed", "glm4_moe")),
    *((name, 2) for name in ("deepseek_v3", "qwen3_5", "nemotron_h", "lfm2")),
    ("qwen3_moe", 3),
]


def alone(checkpoint: Checkpoint, sizes: Sizes = QUICK) -> Answers:
    engine = sizes.engine(checkpoint, sizes.on_reference(checkpoint), grammars())
    answers = play(engine, REQUESTS)
    engine.close()
    return answers


REQUESTS = mixed_requests((3, 19, 1), (4, 3, 3, 2))


def assert_alike(variant: str, size: int, folder: Path, few_rows: int | None) -> None:
    checkpoint = tiny(variant, folder, **SMALL.get(variant, {}))
    with card_ranks(checkpoint, size, QUICK, few_rows) as ranks:
        found = play(QUICK.engine(checkpoint, ranks), REQUESTS)
    assert found == alone(checkpoint)


@pytest.mark.parametrize(("variant", "size"), FAMILIES)
def test_tokens_are_one_ranks(variant: str, size: int, tmp_path: Path) -> None:
    assert_alike(variant, size, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "size"), [*FAMILIES, *OTHERS])
def test_tokens_are_one_ranks_by_the_kernels_of_few_rows(variant: str, size: int, tmp_path: Path) -> None:
    assert_alike(variant, size, tmp_path, None)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "size"), OTHERS)
def test_tokens_of_other_families(variant: str, size: int, tmp_path: Path) -> None:
    assert_alike(variant, size, tmp_path, 0)


def test_experts_and_an_mlp_beside_them_by_the_kernels_of_few_tokens(tmp_path: Path) -> None:
    assert_alike("qwen2_moe", 2, tmp_path, None)


def test_rank_0_samples_and_holds_answers_to_grammars(tmp_path: Path) -> None:
    """Draws, penalties, logprobs of prompts and a grammar: the others are told nothing of these."""
    checkpoint = tiny("llama", tmp_path)
    prompt = range(10, 24)
    asked = [
        request("drawn", prompt, max_tokens=3, temperature=0.9, seed=7, logprobs=1),
        request("read", prompt, max_tokens=2, prompt_logprobs=1, repetition_penalty=1.3),
        held("held", JSON, prompt, max_tokens=4, seed=3),
    ]
    engine = QUICK.engine(checkpoint, QUICK.on_reference(checkpoint), grammars())
    expected = play(engine, asked)
    engine.close()
    with card_ranks(checkpoint, 2, QUICK) as ranks:
        found = play(QUICK.engine(checkpoint, ranks, grammars()), asked)
    assert (found.tokens, found.ends) == (expected.tokens, expected.ends)
    assert [one.token_id for one in found.prompt_logprobs["read"]] == list(prompt)[1:]


@contextmanager
def as_processes(checkpoint: Checkpoint) -> Iterator[CardBackend]:
    settings = BackendSettings(
        max_context=QUICK.max_context, max_tokens_per_step=QUICK.step_tokens, max_running=QUICK.max_rows
    )
    backend = FloatRanks(2).create(checkpoint, QUICK.layout(checkpoint), settings)
    try:
        yield backend
    finally:
        backend.close()


def test_processes_answer_as_one_does_and_one_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    checkpoint = tiny("llama", tmp_path)
    with as_processes(checkpoint) as backend:
        engine = Engine(Scheduler(QUICK.config, QUICK.layout(checkpoint)), backend, checkpoint.spec.vocab_size)
        assert play(engine, REQUESTS) == alone(checkpoint)
        (process,) = backend._others._processes  # type: ignore[attr-defined]
        engine.add(request("cut off", (5, 6, 7), max_tokens=20, ignore_eos=True))
        engine.step()
        os.kill(process.pid, signal.SIGKILL)
        errors = []
        while engine.busy:
            errors += [event.error for event in engine.step() if getattr(event, "error", None)]
        sentence = f"rank 1 of 2 (process {process.pid}) was killed (SIGKILL): the ranks of one model go on together"
        assert len(errors) == 1 and sentence in errors[0]
        assert engine.lost is not None


@pytest.mark.slow
def test_a_rank_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_FAILS_AT_LAUNCH", "2")
    checkpoint = tiny("llama", tmp_path)
    with as_processes(checkpoint) as backend:
        engine = Engine(Scheduler(QUICK.config, QUICK.layout(checkpoint)), backend, checkpoint.spec.vocab_size)
        engine.add(request("cut off", (5, 6, 7), max_tokens=20, ignore_eos=True))
        errors = []
        while engine.busy:
            errors += [event.error for event in engine.step() if getattr(event, "error", None)]
        assert "failed (ValueError: as it was told to): the ranks of one model" in errors[0]


# What is refused, and what is counted


def test_the_factory_is_one_of_ranks() -> None:
    assert isinstance(CUDA, RankedFactory) and isinstance(CUDA, CardRanksFactory)


def test_ranks_share_no_card_unless_they_are_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny("llama", tmp_path)
    ranks = FloatRanks(2)
    assert ranks.supports(checkpoint) is None
    assert "on 1 card, and they meet by gloo, through the host: for correctness" in ranks.described(checkpoint)
    ranks._asked = None
    assert ranks.supports(checkpoint) == (
        "2 ranks need a card each to meet by NCCL, and there is 1; --rank-transport gloo has ranks share a card, which "
        "shows that answers are right and is slower than one rank"
    )
    monkeypatch.setattr(FACTORY, "num_cards", lambda: 2, raising=False)
    assert ranks.supports(checkpoint) is None
    assert ranks.described(checkpoint).endswith("; a card each, and they meet by NCCL")


@pytest.mark.parametrize("variant", ["olmo2", "granite_hybrid"])
def test_norms_over_heads_of_several_ranks_are_declined(variant: str, tmp_path: Path) -> None:
    reason = FloatRanks(2).supports(tiny(variant, tmp_path))
    assert reason == "rank 0 of 2 would have a part that it cannot run: its norms are over numbers of one rank"
    assert FACTORY.supports(tiny(variant, tmp_path / "again")) is None


def test_drafts_are_declined(tmp_path: Path) -> None:
    backend: Any = SimpleNamespace(name="cuda", max_drafts=0, why_no_drafts=CardBackend.why_no_drafts)
    cost: Any = None
    assert speculation("auto", backend, cost, 8, shares=False) == (
        None,
        "speculation off: ranks on cards verify no drafts yet",
    )
    with pytest.raises(BadRequestError, match="ranks on cards verify no drafts yet: leave speculate at auto"):
        speculation("ngram", backend, cost, 8, shares=False)


def test_copies_for_decode_are_declined(tmp_path: Path) -> None:
    checkpoint = tiny("llama", tmp_path)
    formats = Formats("bf16", "bf16", "bf16")
    assert (
        FloatRanks(2).decode_weights(checkpoint, formats) == "ranks on cards hold no copies of weights for decode yet"
    )


@pytest.mark.parametrize(
    ("free", "cards", "expected"),
    [
        ((100, 100), 2, 180),
        ((100, 60), 2, 100),  # the card with less decides: half of every block lies on either
        ((100,), 1, 80),  # ranks that share a card share its memory
    ],
)
def test_the_card_with_the_least_room_decides(
    free: tuple[int, ...], cards: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, ranks = tiny("llama", tmp_path), FloatRanks(2)
    monkeypatch.setattr(FACTORY, "num_cards", lambda: cards, raising=False)

    def room(part: Checkpoint, formats: Formats, sizes: object, card: int) -> CardRoom:
        return CardRoom("a card", 200, free[card], 10, 0.5)

    monkeypatch.setattr(FACTORY, "card_room", room, raising=False)
    formats = Formats("bf16", "bf16", "bf16")
    space = ranks.memory(checkpoint, detect(), formats, CUDA.suits)
    assert space.free_beside_weights_bytes == expected
    assert (space.total_bytes, space.owner) == (200 * cards, "a card" if cards == 1 else "2 x a card")


def test_a_listener_is_declined(tmp_path: Path) -> None:
    checkpoint = tiny("llama", tmp_path)
    settings = replace(BackendSettings(max_context=32, max_tokens_per_step=12), listener=object())  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="ranks on cards do not tell what they make of prompts yet"):
        FloatRanks(2).create(checkpoint, QUICK.layout(checkpoint), settings)


# Kernels of their own


def test_rows_take_tokens_as_if_they_had_sampled_them() -> None:
    records = torch.zeros(4, NUM_WORDS.value, dtype=torch.int64)
    last_tokens = torch.full((4,), 9, dtype=torch.int32)
    rows, tokens = (torch.tensor(values, dtype=torch.int32) for values in ([2, 0, 3, 3], [7, -1, 5, 6]))
    take_tokens(rows, tokens, records, last_tokens)
    assert last_tokens.tolist() == [9, 9, 7, 9], "the padding row, and one without a token, stay as they are"
    assert records[:, NUM_OUTPUT.value].tolist() == [0, 0, 1, 0] and int(records.sum()) == 1


def test_experts_of_other_ranks_have_no_share() -> None:
    chosen = torch.tensor([[4, 1], [5, 6]], dtype=torch.int32)
    shares = torch.tensor([[0.75, 0.25], [0.5, 0.125]])
    keep_held(chosen, shares, 4, 2)
    assert chosen.tolist() == [[0, 0], [1, 0]]
    assert shares.tolist() == [[0.75, 0.0], [0.5, 0.0]]


def test_a_transport_that_is_dropped_late_writes_to_no_other_file(tmp_path: Path) -> None:
    """The number of the descriptor by which ranks met may be another file's by then."""
    met = os.memfd_create("ranks")
    transport = GlooTransport(CardPlace(0, (8,), "gloo", f"/proc/self/fd/{met}"))
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    with mine.open("rb+") as file:
        os.dup2(file.fileno(), met)
        del transport
        gc.collect()
    os.close(met)
    assert mine.read_bytes() == b"mine"
