"""Drafts on the device: which of a step's guesses a row takes, what holds of them, and that whole engines answer the
same with drafts as without, whoever makes them and however many hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, name_of, play, request, with_sampling
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny
from tests.speculation.oracle import Oracle

from bench.cuda import draft_rig
from bench.cuda import drafts as drafts_bench
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.drafting import NO_DRAFT, NOT_FINITE, NOTHING
from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.drafts import Lines, accept_drafts, begin_drafts
from twostroke.backends.cuda.verify import VerifyPath
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts, Step, StepResult
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler
from twostroke.speculation.budget import DraftBudget
from twostroke.speculation.drafter import Ask, Proposal
from twostroke.speculation.speculator import Speculator

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

ROWS, PADDING, WORDS = 5, 5, int(state.NUM_WORDS.value)
WIDTH, DRAFTS = 4, 7


def new_lines(device: str, lengths: Sequence[tuple[int, int]]) -> Lines:
    """Rows of these prompts and outputs."""
    records = torch.zeros(ROWS + 1, WORDS, dtype=torch.int64)
    for row, (prompt, output) in enumerate(lengths):
        records[row, state.PROMPT_LEN.value], records[row, state.NUM_OUTPUT.value] = prompt, output
        records[row, state.SEED.value] = 100 + row
    drafts = torch.arange((ROWS + 1) * DRAFTS, dtype=torch.int32).view(ROWS + 1, DRAFTS)
    return Lines(records.to(device), torch.zeros(ROWS + 1, dtype=torch.int32, device=device), drafts.to(device))


def ints(device: str, numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def test_a_row_takes_the_guesses_behind_its_own_length(device: str) -> None:
    """Whatever the host did not know when it guessed; without a place, the row's drafts stay."""
    lines = new_lines(device, [(10, 2), (10, 2), (3, 0), (8, 1)])
    guesses = ints(device, [[12, 50, 51, 52, -1], [10, 50, 51, 52, 53], [9, 50, 51, 52, 53], [-1, 0, 0, 0, 0]])
    rows = ints(device, [[0] * WIDTH, [1] * WIDTH, [2] * WIDTH, [3, 3, 3, PADDING]])
    spread = torch.full((4 * WIDTH, WORDS), 99, dtype=torch.int64, device=device)
    entered = ints(device, [99] * 4 * WIDTH)
    begin_drafts(rows.view(-1), guesses, lines, spread, entered, width=WIDTH)
    # The first is where the host thought; the second two tokens further; the third not yet where the guesses begin.
    assert lines.drafts[:, :3].tolist()[:4] == [[50, 51, 52], [52, 53, NO_DRAFT], [NO_DRAFT] * 3, [21, 22, 23]]
    assert entered.view(4, WIDTH).tolist() == [[-1, 50, 51, 52], [-1, 52, 53, 0], [-1, 0, 0, 0], [-1, 21, 22, 0]]
    written = spread.view(4, WIDTH, WORDS)[:, :, state.NUM_OUTPUT.value].tolist()
    assert written == [[2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2, 3], [1, 2, 3, 0]]
    seeds = spread.view(4, WIDTH, WORDS)[:, :, state.SEED.value].tolist()
    assert seeds == [[100] * 4, [101] * 4, [102] * 4, [103, 103, 103, 0]]


def expected_tokens(drafts: list[int], draws: list[int], used: int) -> list[int]:
    """Said plainly."""
    came = []
    for place, draw in enumerate(draws[:used]):
        came.append(draw)
        if draw < 0 or place + 1 == used or drafts[place] != draw:
            break
    return came + [NOTHING] * (len(draws) - len(came))


def test_drafts_hold_while_they_are_what_was_drawn(device: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        lines = new_lines(device, [(4, 3)] * ROWS)
        counts_of = torch.zeros(ROWS, 3, dtype=torch.int32, device=device)
        for row in range(ROWS):
            lines.records[row, state.COUNTS.value] = counts_of[row].data_ptr()
        drafts, draws = rng.integers(0, 3, (ROWS, DRAFTS)), rng.integers(0, 3, (ROWS, WIDTH))
        draws = np.where(rng.random(draws.shape) < 0.1, NOT_FINITE, draws)
        drafts = np.where(rng.random(drafts.shape) < 0.1, NO_DRAFT, drafts)
        draws[:2, :3] = drafts[:2, :3] = 1
        used = rng.integers(1, WIDTH + 1, ROWS)
        lines.drafts[:ROWS] = ints(device, drafts.tolist())
        rows = np.where(np.arange(WIDTH) < used[:, None], np.arange(ROWS)[:, None], PADDING)
        tokens, counts, streams = (ints(device, [77] * ROWS * size) for size in (WIDTH, 1, 1))
        flat = ints(device, rows.reshape(-1).tolist())
        accept_drafts(flat, ints(device, draws.reshape(-1).tolist()), lines, tokens, counts, streams, width=WIDTH)
        cases = zip(drafts.tolist(), draws.tolist(), used.tolist(), strict=True)
        expected = [expected_tokens(*case) for case in cases]
        assert tokens.view(ROWS, WIDTH).tolist() == expected
        came = [[token for token in line if token >= 0] for line in expected]
        assert counts.tolist() == [len(line) for line in came] and streams.tolist() == list(range(ROWS))
        assert lines.records[:ROWS, state.NUM_OUTPUT.value].tolist() == [3 + len(line) for line in came]
        assert lines.last_tokens[:ROWS].tolist() == [line[-1] if line else 0 for line in came]
        assert counts_of.tolist() == [[2 * line.count(token) for token in range(3)] for line in came]
        assert not lines.records[PADDING].any(), "padding keeps no state"


def test_so_many_are_forced_to_hold_for_measuring(device: str) -> None:
    lines = new_lines(device, [(4, 3)] * ROWS)
    rows = ints(device, np.repeat(np.arange(ROWS), WIDTH).tolist())
    tokens, counts, streams = (ints(device, [77] * ROWS * size) for size in (WIDTH, 1, 1))
    draws = ints(device, [200] * ROWS * WIDTH)
    accept_drafts(rows, draws, lines, tokens, counts, streams, width=WIDTH, forced=ints(device, [2, 2]))
    assert counts.tolist() == [3] * ROWS
    assert tokens.view(ROWS, WIDTH).tolist() == [[7 * row, 7 * row + 1, 200, NOTHING] for row in range(ROWS)]
    accept_drafts(rows, draws, lines, tokens, counts, streams, width=WIDTH, forced=ints(device, [-1]))
    assert counts.tolist() == [1] * ROWS, "the model decides"


class Told(Drafting):
    """Guesses from answers that are known: right, wrong from some place on, or late by some tokens."""

    def __init__(self, answers: Answers, most: int = 7) -> None:
        self._answers, self._most = answers, most
        self._rng = np.random.default_rng(7)

    def drafts(self, stream: Stream, most: int) -> Drafts | None:
        answer = self._answers.tokens[name_of(stream.request.request_id, stream.sample_index)]
        known = len(stream.tokens) - stream.prompt_len
        guesses = np.array(answer[known : known + 15] or [9])
        wrong = self._rng.random(len(guesses)) < self._rng.choice([0.0, 0.2, 0.6])
        guesses = np.where(wrong, (guesses + 1) % VOCAB_SIZE, guesses)
        count = min(most, self._most, int(self._rng.integers(0, 8)))
        return Drafts(count, tuple(guesses.tolist()), len(stream.tokens)) if count else None


def engine_with(
    sizes: Sizes, checkpoint: Checkpoint, backend: CudaBackend, drafting: Drafting
) -> tuple[Engine, list[tuple[Step, StepResult]]]:
    """And what it does, as it does it."""
    config = SchedulerConfig(
        max_context=sizes.max_context, max_tokens_per_step=sizes.step_tokens, max_running=sizes.max_rows
    )
    scheduler = Scheduler(config, sizes.layout(checkpoint), drafting=drafting, max_drafts=backend.max_drafts)
    engine, steps = Engine(scheduler, backend, checkpoint.spec.vocab_size), []
    engine.on_step = lambda step, result: steps.append((step, result))
    return engine, steps


def advances(steps: list[tuple[Step, StepResult]]) -> set[int]:
    return {len(came) for _, result in steps for came in result.sampled.values()}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(make_tiny("llama", tmp_path_factory.mktemp("one_layer"), num_hidden_layers=1)[0])


SIZES = Sizes(step_tokens=40, max_rows=4, max_context=64, num_blocks=20)
TIGHT = Sizes(step_tokens=20, max_rows=3, max_context=64, num_blocks=5)
"""Streams give way to each other, and prompts come in chunks."""


def check_same(answers: Answers, plain: Answers) -> None:
    """To the letter; logprobs but for the last digits: a host's products round by the number of rows."""
    assert (answers.tokens, answers.ends) == (plain.tokens, plain.ends)
    for name, expected in plain.logprobs.items():
        ours = answers.logprobs[name]
        assert [(one.token_id, [i for i, _ in one.top]) for one in ours] == [
            (one.token_id, [i for i, _ in one.top]) for one in expected
        ]
        np.testing.assert_allclose([one.logprob for one in ours], [one.logprob for one in expected], atol=1e-5)


def check_told(checkpoint: Checkpoint, requests: list[Request], device: str, sizes: Sizes = SIZES) -> set[int]:
    """The lengths that advances had."""
    plain_engine = sizes.engine(checkpoint, sizes.on_device(checkpoint, device))
    plain = play(plain_engine, requests)
    plain_engine.close()
    engine, steps = engine_with(sizes, checkpoint, sizes.on_device(checkpoint, device), Told(plain))
    check_same(play(engine, requests), plain)
    engine.close()
    return advances(steps)


@pytest.mark.parametrize("sizes", [SIZES, TIGHT], ids=["ample", "tight"])
def test_greedy_tokens_are_those_without_drafts(one_layer: Checkpoint, device: str, sizes: Sizes) -> None:
    found = check_told(one_layer, mixed_requests((3, 19, 1), (14, 9, 12, 7)), device, sizes)
    assert found >= {1, 2, 3}


def test_drawn_tokens_are_those_without_drafts(one_layer: Checkpoint, device: str) -> None:
    """Of every kind of sampling, with stop ids that end an answer inside an advance."""
    requests = with_sampling(
        mixed_requests((3, 19, 1), (9, 9, 8, 8), temperature=0.8),
        {"temperature": 0.02, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.4},
        {"top_p": 0.3, "min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 5))},
        {"temperature": 0.05, "min_p": 0.1, "logit_bias": {7: 3.0, 200: -2.0}, "frequency_penalty": 0.5},
        {"logprobs": 2},
    )
    assert max(check_told(one_layer, requests, device)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("gemma2", {}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("mistral", {}),
        ("gpt_oss", {"sliding_window": 8}),
        ("deepseek_v2_lite", {"n_routed_experts": 4, "num_experts_per_tok": 2}),
        ("gemma4", {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}),
        ("hunyuan_dense", {}),
        ("olmo2", {}),
    ],
)
def test_other_families_too(variant: str, changes: Mapping[str, object], tmp_path: Path, device: str) -> None:
    """With windows, caps, sinks, experts, latents, heads of two sizes and norms in other places."""
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path, num_hidden_layers=2, **changes)[0])
    assert check_told(checkpoint, mixed_requests((3, 25, 1), (20, 13, 16, 9)), device) >= {1, 2, 3}


class SmallOracle(Oracle):
    """Of these models' vocabulary."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found = super().propose(asks)
        return [Proposal(tuple(token % VOCAB_SIZE for token in one.token_ids), one.chances) for one in found]


def test_the_host_drafts_one_step_late(one_layer: Checkpoint, device: str) -> None:
    """Through the budget, with a step in flight all the time: guesses are from the last token that came back. Steps are
    said to take hours, so that no drafter is slow beside them, whatever else this machine does."""
    requests = [request(f"r{index}", [5 + index, 9, 9, 8], max_tokens=32) for index in range(2)]
    plain_engine = SIZES.engine(one_layer, SIZES.on_device(one_layer, device))
    plain = play(plain_engine, requests)
    plain_engine.close()
    backend = SIZES.on_device(one_layer, device)
    oracle = SmallOracle({name: [tokens] for name, tokens in plain.tokens.items()}, chance=0.9)
    backend.use_speculator(Speculator([oracle], VOCAB_SIZE))
    budget = DraftBudget(lambda work: 1e4, backend.max_drafts, ["oracle"])
    engine, steps = engine_with(SIZES, one_layer, backend, budget)
    assert play(engine, requests) == plain
    engine.close()
    assert max(advances(steps)) > 3
    drafted = [drafted for _, result in steps for drafted in result.drafted.values()]
    assert drafted and {one.method for one in drafted} == {"oracle"}
    assert len(steps) < 28, f"{len(steps)} steps for 32 tokens of each"


def test_what_is_not_finite_behind_a_draft_ends_the_answer_there(
    one_layer: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens before it told. Every pass is broken before there is a backend: a card replays the passes that
    were captured as it was made."""
    requests = [request("r0", [5, 9, 8], max_tokens=20)]
    plain_engine = SIZES.engine(one_layer, SIZES.on_device(one_layer, device))
    plain = play(plain_engine, requests)
    plain_engine.close()
    settle = VerifyPath._settle

    def broken(path: VerifyPath, bucket: int, width: int) -> None:
        path._draws[: bucket * width].view(bucket, width)[:, -1].fill_(NOT_FINITE)
        settle(path, bucket, width)

    monkeypatch.setattr(VerifyPath, "_settle", broken)

    class Right(Drafting):
        def drafts(self, stream: Stream, most: int) -> Drafts | None:
            answer = plain.tokens["r0"][len(stream.tokens) - 3 :]
            return Drafts(2, tuple(answer[:15]), len(stream.tokens)) if len(answer) > 2 and most > 1 else None

    engine, _ = engine_with(SIZES, one_layer, SIZES.on_device(one_layer, device), Right())
    broken_answer = play(engine, requests)
    engine.close()
    count = len(broken_answer.tokens["r0"])
    assert 0 < count < 20 and broken_answer.tokens["r0"] == plain.tokens["r0"][:count]
    assert broken_answer.ends["r0"] == ("error", "the model produced logits that are not finite")


def test_the_bench_times_the_steps_that_engines_take(
    one_layer: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every width that two streams may have, beside a plain step; each is run once here, and said to take a time."""
    monkeypatch.setattr(draft_rig, "ROOM", 16)
    monkeypatch.setattr(drafts_bench, "median_us", lambda work: work() or 10.0)
    backend = SIZES.on_device(one_layer, device)
    rig = draft_rig.Rig(backend, SIZES.layout(one_layer), SIZES.config, one_layer.spec.vocab_size)
    drafts_bench.times(rig, contexts=(16,), counts=(1, 2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].split() for line in lines[1:]] == [["16", "1", "10"], ["16", "2", "10"]]
    assert all(line.count("(1.000)") == len(drafts_bench.WIDTHS) for line in lines[1:])
    backend.close()
