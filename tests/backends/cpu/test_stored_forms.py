"""Weights of quantised folders on the CPU backend: tiles hold their numbers, exactly or as near as is said out loud;
logits are near the reference's, which multiplies by the very floats that are meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.test_families import TOKENS, cpu_logits, reference_logits
from tests.backends.cpu.unpacking import unpack
from tests.models.quantised.folders import FORMATS, make_quantised
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.held_kinds import tile_kinds
from twostroke.backends.cpu.memory import Arena
from twostroke.backends.cpu.packing import pack
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.backends.cpu.weights import Weights
from twostroke.core.formats import Formats, FormatWish
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.quantise_parts import quantise_parts
from twostroke.models.weights.stored_forms import ScaledTensor
from twostroke.models.weights.tensor import WeightKind, from_float32

EXACT = ("ct_int4", "ct_int8_packed", "ct_int4_channel", "ct_mxfp4", "gptq", "gptq_8", "gptq_file")
"""Scales fit f16 (those of bf16 do unless they are very small), or are powers of two; and zero is the middle."""
HALVES = ("ct_int4_asym", "ct_int8", "ct_nvfp4", "modelopt_nvfp4", "gptq_asym", "gptq_v2", "awq")
"""Codes are kept; a scale, and where there are zero points a minimum, is rounded to f16."""
ROUNDED = tuple(name for name in FORMATS if name not in EXACT + HALVES)
NOTES = {
    "gptq": "21 tensors INT4 repacked to Q4_0 (4.5 bits a weight, exactly)",
    "ct_int4": "21 tensors INT4 repacked to Q4_0 (4.5 bits a weight, scales rounded to f16)",
    "awq": "21 tensors INT4 repacked to Q4_1 (5 bits a weight, scales rounded to f16)",
    "ct_int8": "21 tensors INT8 repacked to Q8_0 (8.5 bits a weight, scales rounded to f16)",
    "fp8_block": "21 tensors FP8 rounded to Q8_0 (8.5 bits a weight)",
    "gptq_order": "21 tensors INT4 with inputs in an order of their own rounded to Q8_0 (8.5 bits a weight)",
    "ct_int8_asym": "21 tensors INT8 with zero points rounded to Q8_0 (8.5 bits a weight)",
    "ct_mxfp4": "21 tensors MXFP4_PARTS repacked to MXFP4 (4.25 bits a weight, exactly)",
}


def packed_and_meant(form: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    tensor = load_checkpoint(make_quantised(form, folder)[0]).tensors["layers.1.gate"]
    assert isinstance(tensor, ScaledTensor)
    values = unpack(pack([tensor], Arena(1 << 18)))
    assert not values[len(tensor.to_float32()) :].any()
    return values[: tensor.shape[0]], tensor.to_float32()


@pytest.mark.parametrize("form", EXACT)
def test_exact(form: str, tmp_path: Path) -> None:
    packed, meant = packed_and_meant(form, tmp_path)
    np.testing.assert_array_equal(packed, meant)


@pytest.mark.parametrize("form", HALVES)
def test_but_for_scales(form: str, tmp_path: Path) -> None:
    """Each of a value's two terms is off by 2^-11 of itself; both are within what the row spans, and once more."""
    packed, meant = packed_and_meant(form, tmp_path)
    assert (np.abs(packed - meant) <= 2**-11 * 2 * np.ptp(meant, axis=1, keepdims=True)).all()
    assert np.abs(packed - meant).max() > 0  # or it belongs to those above


@pytest.mark.parametrize("form", ROUNDED)
def test_rounded_to_8_bits(form: str, tmp_path: Path) -> None:
    """Half a step of the block's own scale, which is a 127th of its largest value and rounded to f16."""
    packed, meant = packed_and_meant(form, tmp_path)
    blocks = meant.reshape(len(meant), -1, 32)
    steps = np.abs(blocks).max(axis=2, keepdims=True) / 127
    assert (np.abs(packed.reshape(blocks.shape) - blocks) <= steps * (0.5 + 127 * 2**-11)).all()


def test_logits_are_near_the_references(tmp_path: Path) -> None:
    """A form of each tile in one model. What is left is activations in 8 bits, KV in 16 and the rounding above. Read
    wrongly, a matrix moves logits by as much as they spread."""
    forms = {"q": "gptq", "k": "awq", "v": "ct_int8", "o": "ct_mxfp4", "gate": "ct_nvfp4", "up": "gptq", "down": "awq"}
    found = {form: load_checkpoint(make_quantised(form, tmp_path / form)[0]) for form in set(forms.values())}
    mixed = dict(found["gptq"].tensors)
    for name in mixed:
        form = forms.get(name.rpartition(".")[2])
        if form is not None:
            mixed[name] = found[form].tensors[name]
    checkpoint = replace(found["gptq"], tensors=mixed)
    assert set(tile_kinds(checkpoint)) >= {TileKind[k] for k in ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "NVFP4")}
    (logits,) = cpu_logits(checkpoint, [[len(TOKENS)]])
    expected = reference_logits(checkpoint)
    assert np.sqrt(((logits - expected) ** 2).mean()) < 0.08 * expected.std()


@pytest.mark.parametrize("form", ["fp8_block", "gptq_order"])
def test_rounded_forms_are_as_if_floats_were_brought_to_8_bits(form: str, tmp_path: Path) -> None:
    quantised, meant = (load_checkpoint(folder) for folder in make_quantised(form, tmp_path))
    np.testing.assert_array_equal(
        cpu_logits(quantised, [[len(TOKENS)]], weights="q8_0"), cpu_logits(meant, [[len(TOKENS)]], weights="q8_0")
    )


@pytest.mark.parametrize("form", NOTES)
def test_what_is_repacked_is_said(form: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_quantised(form, tmp_path)[0])
    notes = Weights.from_checkpoint(checkpoint).notes
    assert NOTES[form] in notes
    formats = FACTORY.formats(checkpoint)
    assert isinstance(formats, Formats) and formats.arithmetic == "int8"
    assert formats.stored == FORMATS[form].kind and f"weights {FORMATS[form].kind} as stored" in formats.line


@pytest.mark.parametrize(("asked", "tile"), [("int4", TileKind.Q4_0), ("fp8", TileKind.Q8_0)])
def test_brought_to_on_load(asked: str, tile: TileKind, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    formats = FACTORY.formats(checkpoint, FormatWish(weights=asked))
    assert isinstance(formats, Formats) and (formats.weights, formats.arithmetic) == (asked, "int8")
    assert tile_kinds(checkpoint, asked) == tuple(kind for kind in TileKind if kind in (tile, TileKind.Q8_0))
    notes = Weights.from_checkpoint(checkpoint, weights=asked).notes
    assert f"21 tensors F32 quantised to {asked.upper()}, packed as {tile.name}" in notes
    stored = checkpoint.tensors["layers.0.down"]
    meant = quantise_parts(WeightKind[asked.upper()], stored.to_float32()).to_float32()
    packed = unpack(pack([stored], Arena(1 << 18), WeightKind[asked.upper()]))[: stored.shape[0]]
    if asked == "int4":
        np.testing.assert_array_equal(packed, meant)
    else:
        again = unpack(pack([from_float32("", meant)], Arena(1 << 18), WeightKind.Q8_0))
        np.testing.assert_array_equal(packed, again[: len(meant)])
    tensors = {
        name: from_float32(name, quantise_parts(WeightKind[asked.upper()], tensor.to_float32()).to_float32())
        if len(tensor.shape) == 2 and name not in ("embedding", "output")
        else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    (found,) = cpu_logits(checkpoint, [[len(TOKENS)]], weights=asked)
    expected = reference_logits(replace(checkpoint, tensors=tensors))
    assert np.sqrt(((found - expected) ** 2).mean()) < 0.08 * expected.std()
