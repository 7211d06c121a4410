"""Matrices that `--quantise` brought to few bits, kept for the next start: the same bits, and nothing is quantised
again; other files, another form and a damaged entry are noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.models.quantised.folders import make_quantised
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import kept_forms
from twostroke.backends.cuda.kernels.eight_bits import EightBitMatrix
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.model_matrices import held_of
from twostroke.backends.cuda.weights import WeightLoader, Weights
from twostroke.core.formats import STORED, Formats
from twostroke.models.loading import load_checkpoint

CPU = torch.device("cpu")
FORMATS = {"fp8": Formats("fp8", "fp8", "bf16"), "int4": Formats("int4", "bf16", "bf16")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_forms, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")[0]


def loaded(folder: Path, weights: str) -> tuple[Weights, WeightLoader]:
    checkpoint = load_checkpoint(folder)
    formats = FORMATS.get(weights, Formats(STORED, "bf16", "bf16"))
    placed, loader = Weights.placed(checkpoint, CPU, torch.bfloat16, held=held_of(checkpoint, formats))
    loader.fill(None)
    return placed, loader


def assert_equal(one: Weights, other: Weights) -> None:
    for ours, theirs in zip(one.matrices(), other.matrices(), strict=True):
        assert torch.equal(ours.as_floats(), theirs.as_floats()), ours.name
        if ours.name != "head":
            assert all(map(torch.equal, kept_forms._tensors([ours.low_bit]), kept_forms._tensors([theirs.low_bit])))


@pytest.mark.parametrize("weights", FORMATS)
def test_the_next_start_quantises_nothing(
    weights: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, loader = loaded(folder, weights)
    assert [note.partition(str(cache))[0] for note in loader.notes] == [
        "matrices in few bits are kept for the next start in "
    ]

    def never(self: object, weight: torch.Tensor) -> None:
        raise AssertionError("quantised again")

    for form in (EightBitMatrix, FourBitMatrix):
        monkeypatch.setattr(form, "quantise", never)
    again, loader = loaded(folder, weights)
    assert loader.notes[0].startswith("matrices in few bits as kept in ")
    assert_equal(first, again)


def test_each_form_and_each_file_has_its_own_entry(folder: Path, cache: Path) -> None:
    for weights in FORMATS:
        loaded(folder, weights)
    assert len(list(cache.iterdir())) == 2
    file = folder / "model.safetensors"
    os.utime(file, ns=(1, 1))
    _, loader = loaded(folder, "fp8")
    assert "are kept for the next start" in loader.notes[0] and len(list(cache.iterdir())) == 3


def test_a_damaged_entry_is_made_again(folder: Path, cache: Path) -> None:
    first, _ = loaded(folder, "int4")
    (entry,) = cache.iterdir()
    content = bytearray(entry.read_bytes())
    content[len(content) // 3] ^= 1
    entry.write_bytes(content)
    again, loader = loaded(folder, "int4")
    assert "were damaged: made again" in loader.notes[0] and "are kept for the next start" in loader.notes[1]
    assert_equal(first, again)
    assert loaded(folder, "int4")[1].notes[0].startswith("matrices in few bits as kept")


def test_a_folder_that_cannot_be_written_is_said(folder: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder")
    _, loader = loaded(folder, "int4")
    assert loader.notes[0].startswith("matrices in few bits are not kept for the next start: ")


def test_what_is_stored_in_few_bits_is_not_kept_twice(tmp_path: Path, cache: Path) -> None:
    _, loader = loaded(make_quantised("gptq", tmp_path)[0], STORED)
    assert not loader.notes and not cache.exists()
