"""A prompt read by one engine and answered by another whose KV has another block size, another kind of numbers or
another backend. Where nothing is rounded the tokens are those of one engine; else their probabilities are near."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.engine.test_handoff import KEY, play, read, settle
from tests.engine.test_tiers import CONTEXT, SHAPES, checkpoints, conversations
from tests.speculation.tiny import VOCAB_SIZE

from twostroke.backends.host.block_conversion import BlockConversion
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.handoff import Handoff
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.kv.handing import NOT_KEPT
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind

assert checkpoints and SHAPES  # fixtures of theirs are ours, too
Made = tuple[str, str, int]
"""Backend, kind of KV, block size."""
NEAR = 0.15
"""Of logarithms: weights of 8 bits, multiplied with numbers of 8 bits on the CPU, are as far apart from the same in 32
bits."""


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models read faster than anything is moved."""
    monkeypatch.setattr(Worth, "loads", lambda *_: True)


def make_engine(checkpoint: Checkpoint, made: Made, name: str, transport: str = "sockets") -> Engine:
    backend, kind, block_size = made
    config = EngineConfig(
        backend=backend,
        threads=1,
        max_context=CONTEXT,
        kv=KVConfig(kind=kind, block_size=block_size, memory_bytes=4_000_000, host_gb=0.004),
    )
    return assemble(checkpoint, None, config, FleetSettings(KEY, transport, engine_id=name)).engine


def hand_over(reader: Engine, writer: Engine, request: Request) -> tuple[dict[str, list[int]], int]:
    """What is written behind a handoff, and how many tokens came."""
    handoff = read(reader, request)
    sizes = [engine.scheduler.ledger.layout.block_size for engine in (reader, writer)]
    num_tokens = (len(request.prompt_token_ids) - 1) // sizes[0] * sizes[0]
    assert (0 if handoff is None else handoff.num_tokens) == num_tokens
    written = play(writer, requests=[(writer, replace(request, handoff=handoff))])
    timing = written.last[f"{request.request_id}.0"].timing
    assert timing is not None and timing.cached_tokens >= num_tokens // sizes[1] * sizes[1]
    if handoff is not None:
        reasons = (None, "all of it is cached here", f"{num_tokens} tokens are less than a block of {sizes[1]}")
        assert timing.handoff is not None and timing.handoff.why_not in (reasons if num_tokens else (NOT_KEPT,))
    settle(reader, writer)
    return written.tokens, timing.tier_tokens.peer


@pytest.mark.parametrize(
    ("shape", "theirs", "own"),
    [
        ("full", ("reference", "auto", 16), ("reference", "auto", 32)),
        ("full and window", ("reference", "auto", 64), ("reference", "auto", 16)),
        ("full and window", ("reference", "auto", 16), ("reference", "auto", 64)),
        ("full", ("cpu", "int8", 64), ("cpu", "int8", 16)),
        ("full and window", ("cpu", "f16", 16), ("cpu", "f16", 32)),
        ("full and window", ("cpu", "bf16", 32), ("cpu", "bf16", 16)),
    ],
    ids=lambda case: "-".join(map(str, case)) if isinstance(case, tuple) else case,
)
def test_tokens_are_those_of_one_engine_whatever_the_block_size(
    shape: str, theirs: Made, own: Made, checkpoints: dict[tuple[str, WeightKind], Checkpoint]
) -> None:
    checkpoint = checkpoints[shape, WeightKind.Q8_0 if own[0] == "cpu" else WeightKind.F32]
    reader, writer, alone = (
        make_engine(checkpoint, made, name) for made, name in ((theirs, "reader"), (own, "writer"), (own, "alone"))
    )
    try:
        num_handed = 0
        for request in conversations(num=3, turns=3):
            tokens, num_tokens = hand_over(reader, writer, request)
            assert tokens == play(alone, requests=[(alone, request)]).tokens
            num_handed += num_tokens
        assert num_handed > 0
    finally:
        for engine in (reader, writer, alone):
            engine.close()


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        (("reference", "auto", 16), ("cpu", "f16", 16)),
        (("cpu", "bf16", 16), ("reference", "auto", 32)),
        (("cpu", "int8", 32), ("cpu", "bf16", 16)),
        (("cpu", "bf16", 16), ("cpu", "int8", 64)),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_probabilities_are_near_where_numbers_are_rounded(
    theirs: Made, own: Made, checkpoints: dict[tuple[str, WeightKind], Checkpoint]
) -> None:
    """Of the first token behind a prompt, which reads all that came. The same KV of another prompt is far away."""
    checkpoint = checkpoints["full and window", WeightKind.Q8_0]
    reader, writer, alone = (
        make_engine(checkpoint, made, name) for made, name in ((theirs, "reader"), (own, "writer"), (own, "alone"))
    )
    try:
        for number in range(3):
            request = with_logprobs(f"{number}", 130 + 11 * number, number)
            handoff = without_first(reader, request)
            written = play(writer, requests=[(writer, replace(request, handoff=handoff))]).last[f"{number}.0"]
            assert written.timing is not None and written.timing.tier_tokens.peer > 64
            expected = play(alone, requests=[(alone, request)]).last[f"{number}.0"]
            other = with_logprobs(f"other{number}", 130 + 11 * number, number + 50)
            strange = play(alone, requests=[(alone, other)]).last[f"other{number}.0"]
            assert difference(written, expected) < NEAR < difference(strange, expected)
            settle(reader, writer)
    finally:
        for engine in (reader, writer, alone):
            engine.close()


def with_logprobs(name: str, length: int, seed: int) -> Request:
    drawn = random.Random(seed)
    prompt = tuple(drawn.randrange(VOCAB_SIZE) for _ in range(length))
    return Request(name, prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20))


def without_first(reader: Engine, request: Request) -> Handoff:
    """As an engine reads it that tells nobody which token it has drawn: whoever writes needs its KV for that."""
    handoff = read(reader, request)
    assert handoff is not None
    return replace(handoff, first=None)


def difference(left: TokenEvent, right: TokenEvent) -> float:
    """The largest, over tokens that both have among their likeliest."""
    tops = [dict(one.logprobs[0].top) for one in (left, right)]
    common = tops[0].keys() & tops[1].keys()
    return max((abs(tops[0][token] - tops[1][token]) for token in common), default=99.0)


def test_nixl_hands_what_must_be_converted_to_sockets(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint],
) -> None:
    pytest.importorskip("nixl_cu12")
    checkpoint = checkpoints["full", WeightKind.F32]
    sizes = {"reader": 16, "writer": 32, "alone": 32}
    reader, writer, alone = (
        make_engine(checkpoint, ("reference", "auto", size), name, "nixl") for name, size in sizes.items()
    )
    try:
        request = conversations(num=1, turns=1)[0]
        tokens, num_tokens = hand_over(reader, writer, request)
        assert num_tokens and tokens == play(alone, requests=[(alone, request)]).tokens
    finally:
        for engine in (reader, writer, alone):
            engine.close()


def test_another_model_and_other_heads_are_refused_by_name(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint],
) -> None:
    """The same shape with other numbers, and what says to have other heads."""
    made = ("reference", "auto", 16)
    reader = make_engine(checkpoints["full", WeightKind.F32], made, "reader")
    writer = make_engine(checkpoints["full", WeightKind.Q8_0], made, "writer")
    alike = make_engine(checkpoints["full", WeightKind.F32], made, "alike")
    try:
        request = with_logprobs("one", 70, 1)
        refused = play(writer, requests=[(writer, replace(request, handoff=read(reader, request)))]).last["one.0"]
        assert refused.timing is not None and refused.timing.handoff is not None
        assert refused.timing.handoff.why_not == "the other engine has another model, other weights or another version"
        handoff = without_first(reader, replace(request, request_id="two"))
        form = handoff.formats.groups[0]
        axes = tuple((name, 4 if name == "kv head" else size) for name, size in form.axes)
        strange = replace(handoff.formats, groups=(replace(form, axes=axes),))
        asked = replace(request, handoff=replace(handoff, formats=strange))
        told = play(alike, requests=[(alike, asked)]).last["one.0"].timing
        assert told is not None and told.handoff is not None and told.cached_tokens == 0
        assert "with 4 heads of 16 numbers, and this one's" in (told.handoff.why_not or "")
        settle(reader, writer, alike)
    finally:
        for engine in (reader, writer, alike):
            engine.close()


def test_a_conversion_that_fails_is_a_prompt_to_read(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(BlockConversion, "convert", fails)
    checkpoint = checkpoints["full", WeightKind.F32]
    reader, writer = (make_engine(checkpoint, ("reference", "auto", size), str(size)) for size in (16, 32))
    try:
        request = with_logprobs("one", 70, 1)
        told = (
            play(writer, requests=[(writer, replace(request, handoff=without_first(reader, request)))])
            .last["one.0"]
            .timing
        )
        assert told is not None and told.handoff is not None and told.cached_tokens == 0
        assert told.handoff.why_not == "KV from 16: MemoryError: no more"
        settle(reader, writer)
    finally:
        reader.close()
        writer.close()
