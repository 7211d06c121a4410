"""The whole backend against the reference, through the scheduler: families, chunked prompts, prefix hits, streams that
come and go, every kind of sampling, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Sizes, mixed_requests, play, play_both, request, with_sampling
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny, uniform_variants

from twostroke.backends.cuda import backend as backend_module
from twostroke.backends.cuda import captured_sizes
from twostroke.backends.cuda.batch import CapturedShape
from twostroke.backends.cuda.graphs import GraphCache, buckets_up_to
from twostroke.backends.cuda.results import CudaTicket, sampling_ids
from twostroke.backends.host.host_backend import NOT_FINITE
from twostroke.core.errors import BackendError
from twostroke.core.step import DecodeSlot, Drafts, Step, TokenLogprobs
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import from_float32

# NaN is meant where it occurs; a device says nothing of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SIZES = Sizes()
QUICK = Sizes(step_tokens=12, max_rows=4, max_context=32)
TOLERANCE = 1e-4


def tiny(variant: str, folder: Path, **changes: Any) -> Checkpoint:
    return load_checkpoint(make_tiny(variant, folder, **changes)[0])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers of Llama: for what does not depend on the family."""
    return tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """For what happens before the first layer and behind the last."""
    return tiny("llama", tmp_path_factory.mktemp("one_layer"), num_hidden_layers=1)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {}),
        ("gemma2", {}),  # norms around each block, soft caps, a window in every other layer
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_greedy_tokens_are_the_references(variant: str, changes: dict[str, Any], tmp_path: Path, device: str) -> None:
    checkpoint = tiny(variant, tmp_path, num_hidden_layers=2, **changes)
    ours, theirs = play_both(checkpoint, mixed_requests((3, 19, 1), (4, 3, 3, 2)), device, QUICK)
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("variant", uniform_variants())
def test_greedy_tokens_are_the_references_in_every_family(variant: str, tmp_path: Path, device: str) -> None:
    ours, theirs = play_both(tiny(variant, tmp_path), mixed_requests((5, 40, 1, 17), (9, 4, 7, 3, 6)), device, SIZES)
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "llama_bias", "qwen3", "qwen3_moe", "gemma2"])
def test_the_fused_kernels_of_a_few_rows_change_no_token(variant: str, tmp_path: Path, device: str) -> None:
    """Gemma's norms keep it off them, but for its logits."""
    requests = mixed_requests((3, 19, 1), (4, 3, 3, 2))
    ours, theirs = play_both(tiny(variant, tmp_path), requests, device, QUICK, few_rows=8)
    assert ours == theirs


def test_two_rows_take_the_fused_kernels(llama: Checkpoint, device: str) -> None:
    ours, theirs = play_both(llama, mixed_requests((2, 16), (3, 2, 2)), device, QUICK, few_rows=2)
    assert ours == theirs


def test_a_slots_position_only_bounds_its_rows(one_layer: Checkpoint, device: str) -> None:
    """As with drafts in flight that will not all hold: a row knows where it stands. Too many drafts are refused."""
    backend, answers = QUICK.on_device(one_layer, device), []
    launch, requests = backend.launch, mixed_requests((2, 16), (3, 2, 2))
    for more in (0, 5):

        def launch_raised(step: Step, more: int = more) -> CudaTicket:
            raised = (slot._replace(position=slot.position + more) for slot in step.decodes)
            return launch(replace(step, decodes=tuple(raised)))

        backend.launch = launch_raised  # type: ignore[method-assign]
        answers.append(play(QUICK.engine(one_layer, backend), requests))
    assert answers[0] == answers[1]
    with pytest.raises(BackendError, match="a slot of 8 drafts, and the cuda backend takes 7"):
        launch(Step(99, decodes=(DecodeSlot(99, 5, Drafts(8)),)))


@pytest.fixture
def shapes_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CapturedShape]]:
    """Small shapes to capture; what was run by one of them, in turn."""
    monkeypatch.setattr(captured_sizes, "MIXED_SLOTS", (8, 16))
    monkeypatch.setattr(captured_sizes, "DECODE_SLOTS", (2, 4))
    for module in (captured_sizes, backend_module):
        monkeypatch.setattr(module, "MAX_CHUNKS", 2)
    shapes: list[CapturedShape] = []
    run = GraphCache.run

    def record(self: GraphCache, key: Any, work: Any) -> None:
        if isinstance(key, CapturedShape):
            shapes.append(key)
        run(self, key, work)

    monkeypatch.setattr(GraphCache, "run", record)
    yield shapes


def test_steps_padded_to_a_captured_shape_change_no_token(
    llama: Checkpoint, device: str, shapes_run: list[CapturedShape]
) -> None:
    requests = mixed_requests((3, 5, 11, 30, 1), (9, 6, 5, 2, 3, 2))
    ours, theirs = play_both(llama, requests, device, Sizes(step_tokens=24, max_rows=5, max_context=32))
    assert ours == theirs
    mixed = {shape for shape in shapes_run if shape.decode_slots}
    assert {shape.num_tokens for shape in mixed} == {8, 16} and {shape.decode_slots for shape in mixed} >= {2, 4}
    assert all(shape.sampled_chunks == 2 for shape in mixed)


def test_steps_without_a_graph_sample_as_many_tokens_as_decode_graphs_have(
    one_layer: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last attention they launch what was launched at start, and padding changes no token. A chunk inside a
    prompt wants no logits at all."""
    for name in ("LONE_SLOTS", "MIXED_SLOTS"):
        monkeypatch.setattr(captured_sizes, name, ())
    sizes = Sizes(step_tokens=24, max_rows=7, max_context=48)
    requests = mixed_requests((30, 4, 3, 5, 2, 6), (9, 8, 7, 6, 5, 4, 3), ignore_eos=True)
    requests = with_sampling(requests, *({"temperature": 0.7 * (index % 2)} for index in range(len(requests))))
    backend = sizes.on_device(one_layer, device, few_rows=2)
    path, decoder = backend._prefills, backend._parts.decoder
    launch, forward, logits = path.launch, decoder.forward, decoder.logits
    counts: list[int] = []
    steps: list[list[int]] = []  # of each: tokens to sample, tokens that left the last layer, rows of logits

    def record_launch(step: Step, *waits: Any) -> Any:
        counts[:] = [len(sampling_ids(step))]
        launched = launch(step, *waits)
        steps.append(list(counts))
        return launched

    def record_forward(*arguments: Any, **options: Any) -> torch.Tensor:
        residual = forward(*arguments, **options)
        counts.append(len(residual))
        return residual

    def record_logits(residual: torch.Tensor, **options: Any) -> torch.Tensor:
        counts.append(len(residual))
        return logits(residual, **options)

    monkeypatch.setattr(path, "launch", record_launch)
    monkeypatch.setattr(decoder, "forward", record_forward)
    monkeypatch.setattr(decoder, "logits", record_logits)
    ours = play(sizes.engine(one_layer, backend), requests)
    assert ours == play(sizes.engine(one_layer, sizes.on_reference(one_layer)), requests)
    least = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 7}
    assert set(buckets_up_to(sizes.max_rows)) == set(least.values())
    assert [0, 0] in steps and [2, 2, 2] in steps and [5, 6, 6] in steps
    assert all(step == [0, 0] or step == [step[0], least[step[0]], least[step[0]]] for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gemma2", "qwen3_moe", "phi3"])
def test_padding_reaches_no_window_and_no_expert(
    variant: str, tmp_path: Path, device: str, shapes_run: list[CapturedShape]
) -> None:
    ours, theirs = play_both(tiny(variant, tmp_path), mixed_requests((5, 40, 1, 7), (9, 6, 7, 3, 6)), device, SIZES)
    assert ours == theirs
    assert any(shape.decode_slots for shape in shapes_run)


def test_what_is_run_for_captures_touches_nobodys_row(
    llama: Checkpoint, device: str, shapes_run: list[CapturedShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shape's work, run between the steps of running streams."""
    monkeypatch.setattr(GraphCache, "prepare", lambda self, key, work, sample: work())
    sizes = Sizes(step_tokens=12, max_rows=2, max_context=32)
    requests = mixed_requests((3, 19, 1), (6, 4, 4, 3), temperature=0.7)
    expected = play(sizes.engine(llama, sizes.on_reference(llama)), requests)
    backend = sizes.on_device(llama, device)
    engine = sizes.engine(llama, backend)
    launch, launched = backend.launch, []

    def launch_after_captures(step: Step) -> CudaTicket:
        if len(launched) == 3:
            backend.prepare()
        launched.append(step)
        return launch(step)

    monkeypatch.setattr(backend, "launch", launch_after_captures)
    assert play(engine, requests) == expected
    assert len(launched) > 4


SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "top_k": 40},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2)), "logprobs": 0},
]


def assert_logprobs_alike(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_id, len(mine.top)) == (other.token_id, len(other.top))
        assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [p for _, p in mine.top] == pytest.approx([p for _, p in other.top], abs=TOLERANCE)
        assert [i for i, _ in mine.top] == [i for i, _ in other.top]


def test_sampled_tokens_and_logprobs_are_the_references(
    one_layer: Checkpoint, device: str, shapes_run: list[CapturedShape]
) -> None:
    """The same random numbers on both, whatever company a row is in, and in padded steps too."""
    requests = with_sampling(mixed_requests((3, 19, 1), (4, 3, 5, 6)), *SAMPLINGS)
    requests.append(request("prompt", range(30, 50), max_tokens=2, prompt_logprobs=3, logprobs=1))
    ours, theirs = play_both(one_layer, requests, device, QUICK)
    assert (ours.tokens, ours.ends) == (theirs.tokens, theirs.ends)
    for name in ("r0", "r3", "prompt"):
        assert_logprobs_alike(ours.logprobs[name], theirs.logprobs[name])
    assert len(ours.logprobs["r0"]) == len(ours.tokens["r0"]) and not ours.logprobs["r1"]
    assert len(ours.prompt_logprobs["prompt"]) == 19
    assert_logprobs_alike(ours.prompt_logprobs["prompt"], theirs.prompt_logprobs["prompt"])
    assert any(shape.decode_slots for shape in shapes_run)


BROKEN_TOKEN = 5


@pytest.fixture
def broken_llama(llama: Checkpoint) -> Checkpoint:
    """One token's embedding is not a number."""
    rows = llama.tensors["embedding"].to_float32().copy()
    rows[BROKEN_TOKEN] = np.nan
    return replace(llama, tensors={**llama.tensors, "embedding": from_float32("embedding", rows)})


def test_logits_that_are_not_finite_end_their_request_and_harm_no_other(
    llama: Checkpoint, broken_llama: Checkpoint, device: str
) -> None:
    """Neither beside it in a step, nor in the blocks and the row that it leaves behind."""
    healthy = mixed_requests((3, 19, 1), (5, 3, 4, 2))
    broken = [
        request("broken", [40, BROKEN_TOKEN, 41], max_tokens=4),
        request("broken prompt", [40, 41, BROKEN_TOKEN, 42], max_tokens=4, prompt_logprobs=1),
    ]
    sizes = replace(QUICK, num_blocks=6)
    expected = play(sizes.engine(llama, sizes.on_reference(llama)), healthy)
    assert all(BROKEN_TOKEN not in tokens for tokens in expected.tokens.values())
    order = [healthy[0], broken[0], healthy[1], broken[1], *healthy[2:]]
    ours = play(sizes.engine(broken_llama, sizes.on_device(broken_llama, device)), order)
    for asked in broken:
        assert ours.ends.pop(asked.request_id) == ("error", NOT_FINITE)
        assert ours.tokens.pop(asked.request_id) == []
    assert (ours.tokens, ours.ends) == (expected.tokens, expected.ends)


def test_more_sequences_than_rows_aborts_and_preemption_leave_nothing(llama: Checkpoint, device: str) -> None:
    sizes = Sizes(step_tokens=16, max_rows=3, max_context=48, num_blocks=4)
    requests = mixed_requests((14, 15, 3, 13, 15, 2), (9, 8, 7, 12, 6, 3, 2), ignore_eos=True)
    roomy = replace(sizes, num_blocks=40)
    expected = play(roomy.engine(llama, roomy.on_reference(llama)), requests)
    backend = sizes.on_device(llama, device)
    engine = sizes.engine(llama, backend)
    ours = play(engine, requests, aborts={6: "r2", 9: "r4", 11: "nobody"})
    assert engine.scheduler.counts().preemptions > 0
    for name, tokens in expected.tokens.items():
        if name in ("r2", "r4"):
            assert ours.ends[name] == ("abort", None)
            assert ours.tokens[name] == tokens[: len(ours.tokens[name])]
        else:
            assert (ours.tokens[name], ours.ends[name]) == (tokens, expected.ends[name])
    assert len(backend._parts.rows) <= sizes.max_rows


def test_a_launch_that_raises_ends_its_requests_and_keeps_no_row(
    llama: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again: rows that were opened for a step that never ran must not pile up."""
    backend = QUICK.on_device(llama, device)
    engine = QUICK.engine(llama, backend)
    launch = backend._prefills.launch

    def refuse(step: Any, *waits: Any) -> Any:
        raise RuntimeError("no memory")

    for attempt in range(QUICK.max_rows + 1):
        monkeypatch.setattr(backend._prefills, "launch", refuse)
        answers = play(engine, [request(f"lost {attempt}", [7, 8, 9], max_tokens=2)])
        assert answers.ends == {f"lost {attempt}": ("error", "the cuda backend failed: no memory")}
        assert len(backend._parts.rows) == 0
    monkeypatch.setattr(backend._prefills, "launch", launch)
    requests = mixed_requests((3, 5), (2, 3, 2))
    assert play(engine, requests) == play(QUICK.engine(llama, QUICK.on_reference(llama)), requests)
