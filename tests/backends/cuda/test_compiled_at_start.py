"""No request waits for a compiler: whatever kernels real steps launch, `prepare` has launched, specialised alike. It
has them compiled beside each other before it launches them, and launches them before it captures a step. Told in the
interpreter, which compiles nothing, by what Triton would compile a kernel anew for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.engines import Sizes, mixed_requests, play, request, with_sampling
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny
from triton.runtime.interpreter import InterpretedFunction

from twostroke.backends.cuda import backend as backend_module
from twostroke.backends.cuda import captured_sizes
from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.batch import CapturedShape
from twostroke.backends.cuda.compile_ahead import compilers, rehearsal
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.backends.cuda.kernels.paged import AttentionShape
from twostroke.models.loading import load_checkpoint

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a card nothing is interpreted"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),  # NaN is meant where it occurs
]

SIZES = Sizes(step_tokens=20, max_rows=5, max_context=32)
SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0.6},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_k": 40},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2)), "logprobs": 0},
    {"temperature": 0.9, "presence_penalty": 0.5},
]


def specialised(function: InterpretedFunction, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What a compiled kernel is kept under."""
    parameters = inspect.signature(function.fn).parameters
    named = dict(zip(parameters, arguments, strict=False)) | options
    any_value = function.kwargs["do_not_specialize"] or ()
    any_alignment = function.kwargs["do_not_specialize_on_alignment"] or ()

    def kind(name: str, value: Any) -> Any:
        if name not in parameters or "constexpr" in str(parameters[name].annotation) or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype, name in any_alignment or value.data_ptr() % 16 == 0
        if isinstance(value, int) and name not in any_value:
            return "one" if value == 1 else value % 16 == 0
        return type(value).__name__

    return function.fn.__qualname__, *((name, kind(name, value)) for name, value in sorted(named.items()))


@pytest.fixture
def rehearsed() -> set[tuple[Any, ...]]:
    return set()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, rehearsed: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    kernels: set[tuple[Any, ...]] = set()
    run = InterpretedFunction.run

    def record(self: InterpretedFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        (rehearsed if warmup else kernels).add(specialised(self, arguments, options))
        return run(self, *arguments, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return kernels


def test_decodes_of_any_number_are_cut_by_what_start_up_launched(launched: set[tuple[Any, ...]]) -> None:
    attention = Attention(AttentionShape(2, 1, 16, 16, torch.float32), "cpu", max_decode_tokens=80)
    attention.prepare((None, 20))
    at_start = set(launched)
    assert len(at_start) == 6  # with and without a window: to 32, to 64, and more
    for number in (2, 29, 30, 32, 33, 64, 65, 80):
        attention.cut_decodes(torch.zeros(number, dtype=torch.int32), (None, 20))
    assert launched == at_start


@pytest.mark.parametrize(
    ("variant", "few_rows", "changes"),
    [
        ("llama", 2, {"num_hidden_layers": 3}),
        pytest.param("gemma2", 0, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 8, {"num_experts": 4, "num_experts_per_tok": 2}, marks=pytest.mark.slow),
        pytest.param("lfm2", 0, {"layer_types": ["conv", "full_attention"]}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 0, {"layer_types": ["linear_attention", "full_attention"]}, marks=pytest.mark.slow),
    ],
)
def test_steps_launch_nothing_that_start_up_did_not(
    variant: str,
    few_rows: int,
    changes: dict[str, Any],
    tmp_path: Path,
    rehearsed: set[tuple[Any, ...]],
    launched: set[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured_sizes, "MIXED_SLOTS", (8, 16))
    monkeypatch.setattr(captured_sizes, "DECODE_SLOTS", (2, 4))
    for module in (captured_sizes, backend_module):
        monkeypatch.setattr(module, "MAX_CHUNKS", 2)

    kinds_of_graphs: set[object] = set()

    def prepare(self: GraphCache, key: Hashable, work: Callable[[], None], sample: Callable[[], None]) -> None:
        sample()
        kind = key.decode_slots > 0 if isinstance(key, CapturedShape) else type(key)
        if variant == "llama" and kind not in kinds_of_graphs:  # the others have no two layers alike
            kinds_of_graphs.add(kind)
            met = set(launched)
            work()  # on a card this is captured
            assert launched == met

    monkeypatch.setattr(GraphCache, "prepare", prepare)
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path, **{"num_hidden_layers": 2, **changes})[0])
    backend = SIZES.on_device(checkpoint, "cpu", few_rows=few_rows)
    with compilers() as threads, rehearsal(threads):
        backend.prepare(rehearses=True)
    assert not launched
    backend.prepare()
    assert len(kinds_of_graphs) == (3 if variant == "llama" else 0)
    at_start = set(launched)
    assert at_start and rehearsed == at_start
    requests = with_sampling(mixed_requests((3, 21, 1, 24), (4, 3, 4, 5, 4)), *SAMPLINGS)
    requests.append(request("greedy", range(40, 58), max_tokens=3))
    requests.append(request("prompt", range(30, 50), max_tokens=2, prompt_logprobs=3, logprobs=1))
    play(SIZES.engine(checkpoint, backend), requests)
    missing = launched - at_start
    assert not missing, sorted({kernel for kernel, *_ in missing})
