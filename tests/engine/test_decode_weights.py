"""Whether copies of weights for decode are held: by what was asked for, by what the backend can, by what KV needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.backends import cpu
from twostroke.config import EngineConfig, KVConfig, ResolvedConfig, resolve
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import PACKED
from twostroke.core.kv_layout import KVGroupNeed
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.model_shape import DecodeWeights, WeightCopies
from twostroke.engine.build import prepare
from twostroke.engine.decode_weights import Holding, choose_decode_weights
from twostroke.machine import MemorySpace
from twostroke.models.loading import load_checkpoint

TOKEN_BYTES = 1000
FULL = (KVGroupNeed(layers=(0, 1), window=None, bytes_per_token=TOKEN_BYTES),)
SUITS = StepSizes(block_size=64, max_tokens_per_step=512, max_running=16)
COPIES = DecodeWeights(WeightCopies(30_000_000, 40_000_000, 128), WeightCopies(70_000_000, 93_000_000, 512))
"""100 MB together."""


def choose(
    free_bytes: int,
    offered: DecodeWeights | str | None = COPIES,
    needs: tuple[KVGroupNeed, ...] = FULL,
    model_context: int = 4096,
    **settings: object,
) -> Holding:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    memory = MemorySpace("this GPU", total_bytes=1 << 40, free_beside_weights_bytes=free_bytes, kv_share=1.0)
    return choose_decode_weights(config, offered, memory, needs, resolver(config, needs, model_context))


def resolver(
    config: EngineConfig, needs: tuple[KVGroupNeed, ...], model_context: int
) -> Callable[[MemorySpace], ResolvedConfig]:
    return lambda memory: resolve(config, model_context, needs, memory, SUITS, 1)


def test_auto_packs_where_every_stream_keeps_its_tokens() -> None:
    least = 16 * 512 * TOKEN_BYTES + COPIES.num_bytes
    packed = choose(least, model_context=2048)
    assert packed.copies is COPIES and packed.resolved.kv_tokens == 16 * 512
    assert packed.reason == (
        "decode weights packed (decode has less to read, in 12 bits a weight; 0.1 GB more held, "
        "KV for 8192 tokens left)"
    )
    plain = choose(least - 1, model_context=2048)
    assert plain.copies is None and plain.resolved.kv_tokens == 16 * 2048
    assert plain.reason == (
        "decode weights plain (0.1 GB more, packed, would leave KV for less than 16 streams of 512 tokens)"
    )
    assert choose(least, model_context=2048, max_running=17).copies is None
    assert choose(least - 512 * TOKEN_BYTES, model_context=2048, max_running=15).copies is COPIES


def test_auto_keeps_room_for_two_sequences_of_the_longest_context() -> None:
    least = 2 * 32_768 * TOKEN_BYTES + COPIES.num_bytes
    assert choose(least, model_context=32_768).copies is COPIES
    plain = choose(least - 1, model_context=32_768)
    assert plain.copies is None and "KV for less than 2 streams of 32768 tokens" in str(plain.reason)
    assert plain.resolved.max_context == 32_768, "and no context is given up for copies"
    assert choose(least - 1, model_context=32_768, max_context=16_384).copies is COPIES


def test_short_contexts_and_windows_need_less() -> None:
    assert choose(16 * 256 * TOKEN_BYTES + COPIES.num_bytes, max_context=256).copies is COPIES
    windowed = (KVGroupNeed(layers=(0, 1), window=64, bytes_per_token=TOKEN_BYTES),)
    one = 64 + 2 * 512 + 64
    assert choose(16 * 512 * TOKEN_BYTES + COPIES.num_bytes, needs=windowed, model_context=1 << 20).copies is COPIES
    assert choose(2 * one * TOKEN_BYTES + COPIES.num_bytes, needs=windowed, max_running=2).copies is COPIES


def test_auto_leaves_the_kv_that_was_asked_for() -> None:
    kv = KVConfig(memory_bytes=5_000_000)
    assert choose(105_000_000, kv=kv).copies is COPIES, "the user's word on KV goes before the rule's"
    plain = choose(104_999_999, kv=kv)
    assert plain.copies is None and "less than the 5.0 MB of KV that were asked for" in str(plain.reason)


def test_plain_never_packs() -> None:
    holding = choose(1 << 35, decode_weights="plain")
    assert holding.copies is None and holding.reason == "decode weights plain (asked for)"


def test_what_cannot_be_had_is_plain_and_refused_where_it_was_asked_for() -> None:
    sentence = "products with packed weights need a Hopper GPU"
    assert choose(1 << 30, sentence).reason == f"decode weights plain ({sentence})"
    assert choose(1 << 30, sentence).copies is None
    with pytest.raises(BackendError, match=f"cannot be packed here: {sentence}$"):
        choose(1 << 30, sentence, decode_weights="packed")
    silent = choose(1 << 30, None)
    assert silent.copies is None and silent.reason is None
    with pytest.raises(BackendError, match="this backend reads the same weights in both phases"):
        choose(1 << 30, None, decode_weights="packed")


def test_packed_takes_what_there_is() -> None:
    holding = choose(COPIES.num_bytes + 4096 * TOKEN_BYTES, decode_weights="packed")
    assert holding.copies is COPIES and holding.resolved.kv_tokens == 4096
    assert "asked for" in str(holding.reason)


def test_packed_that_does_not_fit_says_what_plain_would_allow() -> None:
    with pytest.raises(BadRequestError) as raised:
        choose(COPIES.num_bytes + 100, decode_weights="packed")
    assert "with 0.1 GB of packed weights for decode beside the others, 100 B for KV" in str(raised.value)
    assert "--decode-weights plain leaves KV for 65536 tokens, of a context up to 4096" in str(raised.value)
    with pytest.raises(BadRequestError, match=r"2048 needs .* 1024 would fit; --decode-weights plain leaves KV for"):
        choose(COPIES.num_bytes + 1024 * TOKEN_BYTES, decode_weights="packed", max_context=2048)
    with pytest.raises(BadRequestError) as hopeless:
        choose(100, decode_weights="packed")
    assert "packed" not in str(hopeless.value), "packing is not to blame"


def test_a_preparation_says_what_is_held_and_counts_it(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, config = load_checkpoint(smollm2_path), EngineConfig(backend="cpu")
    plain = prepare(checkpoint, config)
    assert plain.shape.decode_weights is None and not any("decode weights" in reason for reason in plain.reasons)
    with pytest.raises(BackendError, match="decode weights cannot be packed here"):
        prepare(checkpoint, EngineConfig(backend="cpu", decode_weights="packed"))
    monkeypatch.setattr(cpu.FACTORY, "decode_weights", lambda checkpoint, formats: COPIES)
    packed = prepare(checkpoint, EngineConfig(backend="cpu", decode_weights="packed"))
    assert packed.shape.decode_weights is COPIES
    assert packed.shape.weight_bytes == plain.shape.weight_bytes + COPIES.num_bytes
    assert packed.formats.copies == PACKED and plain.formats.copies is None
    (line,) = (reason for reason in packed.reasons if reason.startswith("formats: "))
    assert "packed copies for decode" in line and "decode weights packed (asked for" in line
    assert packed.calibration_path != plain.calibration_path, "other weights are read, at other costs"
