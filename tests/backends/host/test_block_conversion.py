"""Blocks turned into blocks of another size, kind and order: held to a plain loop over tokens, and to what the CPU's
kernels wrote beside what the reference computed of the same prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.driver import Driver, layout_for
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny
from tests.properties import examples

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.host.block_codecs import codec_of
from twostroke.backends.host.block_conversion import BlockConversion
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.kv_numbers import Numbers, from_floats, of_kind, to_floats
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.errors import BadRequestError
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.kv_blocks import BlockFormat, KVFormat
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

LAYERS, HEADS, WIDTH = 2, 3, 16
KINDS = ("float32", "float16", "bfloat16", "packed f16", "packed bf16", "packed int8", "heads first")
TOKEN_BYTES = {"f16": 4 * WIDTH, "bf16": 4 * WIDTH, "int8": 2 * WIDTH + 4}


def form_of(kind: str, block_size: int) -> KVFormat:
    """One group, as the reference, the CPU or CUDA would have it."""
    if kind.startswith("packed"):
        name = kind.split()[1]
        axes = (("layer", LAYERS), ("kv head", HEADS), ("byte", block_size * TOKEN_BYTES[name]))
        form = BlockFormat((0, 1), None, f"{name} of head size {WIDTH}, packed for cpu", 1, axes)
    else:
        inner = (("position", block_size), ("kv head", HEADS))
        axes = (("layer", LAYERS), ("keys, values", 2), *(inner[::-1] if kind == "heads first" else inner))
        element = "bfloat16" if kind == "heads first" else kind
        size = 4 if element == "float32" else 2
        form = BlockFormat((0, 1), None, element, size, (*axes, ("number", WIDTH)))
    return KVFormat("test", "none", block_size, (form,))


def packed(formats: KVFormat, floats: np.ndarray) -> list[bytearray]:
    """[layers, parts, tokens, heads, width] as blocks."""
    codec, size = codec_of(formats.groups[0], formats.block_size), formats.block_size
    assert codec is not None
    blocks = []
    for start in range(0, floats.shape[2], size):
        block = bytearray(formats.groups[0].num_bytes)
        into = np.frombuffer(memoryview(block), dtype=np.uint8)
        codec.pack(from_floats(floats[:, :, start : start + size], codec.kind), into)
        blocks.append(block)
    return blocks


def unpacked(formats: KVFormat, block: bytearray) -> Numbers:
    codec = codec_of(formats.groups[0], formats.block_size)
    assert codec is not None
    return codec.unpacked(np.frombuffer(bytes(block), dtype=np.uint8))


@given(
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.sampled_from((8, 16, 32, 64)),
    st.sampled_from((8, 16, 32, 64)),
    st.integers(0, 99),
)
@examples(80)
def test_every_token_is_where_a_plain_loop_puts_it(source: str, target: str, theirs: int, own: int, seed: int) -> None:
    """Whole blocks of one size, of any kind, from blocks of another."""
    theirs, own = (max(16, size) if "packed" in kind else size for kind, size in ((source, theirs), (target, own)))
    floats = np.random.default_rng(seed).standard_normal((LAYERS, 2, 128, HEADS, WIDTH)).astype(np.float32)
    other, mine = form_of(source, theirs), form_of(target, own)
    sources, conversion = packed(other, floats), BlockConversion(mine)
    assert conversion.misfit(other) is None
    stored = [unpacked(other, block) for block in sources]
    for index in range(128 // own):
        first, last = index * own // theirs, ((index + 1) * own - 1) // theirs
        into = bytearray(mine.groups[0].num_bytes)
        views = [memoryview(block) for block in sources[first : last + 1]]
        conversion.convert(other, 0, views, index * own - first * theirs, memoryview(into))
        found = unpacked(mine, into)
        for offset in range(own):
            position = index * own + offset
            token = stored[position // theirs].positions(position % theirs, position % theirs + 1)
            expected = of_kind(token, found.kind)
            assert np.array_equal(found.values[:, :, offset], expected.values[:, :, 0])
            if found.scales is not None and expected.scales is not None:
                assert np.array_equal(found.scales[:, :, offset], expected.scales[:, :, 0])


@given(st.sampled_from(("float16", "bfloat16", "int8")), st.integers(0, 999), st.floats(-20.0, 8.0))
@examples(60)
def test_what_is_lost_is_what_the_kind_loses(kind: str, seed: int, exponent: float) -> None:
    drawn = np.random.default_rng(seed).standard_normal((1, 2, 5, 2, 16)).astype(np.float32) * np.float32(2.0**exponent)
    found = to_floats(from_floats(drawn, kind))
    if kind == "int8":
        allowed = np.abs(drawn).max(axis=-1, keepdims=True) * (0.51 * 1.01 / 127)
    else:
        allowed = np.maximum(np.abs(drawn) * 2.0 ** (-11 if kind == "float16" else -8), 2.0**-25)
    assert (np.abs(found - drawn) <= allowed).all()
    again = from_floats(found, kind) if kind != "int8" else None
    assert again is None or np.array_equal(again.values, from_floats(drawn, kind).values)


def test_what_is_not_finite_is_not_stored() -> None:
    wild = np.array([np.nan, np.inf, -np.inf, 3e38], dtype=np.float32).reshape(1, 1, 1, 1, 4).repeat(2, axis=1)
    for kind in ("float32", "float16", "bfloat16", "int8"):
        assert np.isfinite(to_floats(from_floats(wild, kind))).all()


def test_what_cannot_be_converted_is_said() -> None:
    own = form_of("float32", 16)
    conversion, form = BlockConversion(own), own.groups[0]
    other = form_of("packed bf16", 32)
    assert conversion.misfit(other) is None
    heads = replace(other.groups[0], axes=(("layer", LAYERS), ("kv head", HEADS + 1), other.groups[0].axes[2]))
    assert "has 2 layers with 4 heads of 16 numbers, and this one's" in str(conversion.misfit(with_group(other, heads)))
    assert "other layers" in str(conversion.misfit(with_group(own, replace(form, layers=(0, 2)))))
    assert "other windows" in str(conversion.misfit(with_group(own, replace(form, window=40))))
    strange = replace(form, element="q4 of something")
    assert "'q4 of something' cannot be turned" in str(conversion.misfit(with_group(own, strange)))
    for axes in ((("layer", 2), ("number", 64)), (("layer", 2), ("state", 1), ("number", 64))):  # a host's, a card's
        state = BlockFormat((0, 1), None, "float32", 4, axes)
        assert "states" in str(conversion.misfit(with_group(own, state)))
        assert BlockConversion(with_group(own, state)).misfit(replace(with_group(own, state), block_size=64)) is None


def with_group(formats: KVFormat, group: BlockFormat) -> KVFormat:
    return replace(formats, groups=(group,))


def test_a_format_is_read_back_as_it_was_told() -> None:
    for kind in KINDS:
        formats = form_of(kind, 16)
        assert KVFormat.read(formats.described()) == formats
    for text in ("", "[]", "{}", '{"groups": 3}', '{"groups": [{"layers": [1]}]}', '{"groups": [], "more": 1}'):
        with pytest.raises(BadRequestError, match="cannot be read"):
            KVFormat.read(text)


def backends(checkpoint: Checkpoint, kind: str) -> tuple[HostBackend, HostBackend]:
    """The reference with blocks of 8, the CPU with blocks of 32."""
    formats = CPU.formats(checkpoint, FormatWish(None, kv=kind), None)
    assert isinstance(formats, Formats), formats
    settings = BackendSettings(max_context=256, max_tokens_per_step=128, threads=1)
    reference = REFERENCE.create(checkpoint, layout_for(checkpoint.spec, 96, 8), settings)
    return reference, CPU.create(checkpoint, layout_for(checkpoint.spec, 96, 32), replace(settings, formats=formats))


@pytest.mark.parametrize(
    ("variant", "kind", "tolerance"),
    [
        ("llama", "f16", 2e-3),
        ("llama", "bf16", 2e-2),
        ("llama", "int8", 3e-2),
        ("deepseek_v3", "f16", 2e-3),
        ("deepseek_v3", "bf16", 2e-2),
    ],
)
def test_what_the_kernels_wrote_is_what_the_reference_computed(
    variant: str, kind: str, tolerance: float, tmp_path: Path
) -> None:
    """Both ways: the CPU's blocks as the reference's, and the reference's as the CPU's, whose numbers round alike."""
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    tokens = [int(token) for token in np.random.default_rng(7).integers(6, VOCAB_SIZE, 64)]
    reference, cpu = backends(checkpoint, kind)
    try:
        for backend in (reference, cpu):
            Driver(backend, tokens).prefill(64)
        for source, target in ((cpu, reference), (reference, cpu)):
            compare(source, target, tolerance)
    finally:
        reference.close()
        cpu.close()


def compare(source: HostBackend, target: HostBackend, tolerance: float) -> None:
    formats, own = source.block_format, target.block_format
    conversion = BlockConversion(own)
    assert conversion.misfit(formats) is None
    theirs, mine = blocks_of(source), blocks_of(target)
    for index, expected in enumerate(mine):
        first, last = (
            index * own.block_size // formats.block_size,
            ((index + 1) * own.block_size - 1) // formats.block_size,
        )
        into = bytearray(len(expected))
        views = [memoryview(block) for block in theirs[first : last + 1]]
        conversion.convert(formats, 0, views, index * own.block_size - first * formats.block_size, memoryview(into))
        found, wanted = (to_floats(unpacked(own, block)) for block in (into, expected))
        assert np.sqrt(((found - wanted) ** 2).mean()) < tolerance * wanted.std()


def blocks_of(backend: HostBackend) -> list[bytearray]:
    """Of the sequence's first group, in order."""
    table, blocks = backend.rows[0].tables[0], []
    for block in table[: 64 // backend.layout.block_size]:
        blocks.append(bytearray(backend.block_format.groups[0].num_bytes))
        backend.read_blocks(0, [int(block)], memoryview(blocks[-1]))
    return blocks
