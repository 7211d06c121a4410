"""Packed weights on disk: found again bit for bit, known by their files and their form, whole or not used at all, and
never in the way."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
from tests.backends.driver import layout_for, logits_by_prefill
from tests.models.quantised.folders import make_quantised
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu import FACTORY, packed_cache
from twostroke.backends.cpu.weights import Weights
from twostroke.backends.host import kept_weights
from twostroke.backends.interface import BackendSettings
from twostroke.config import EngineConfig
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import assemble
from twostroke.engine.offline import LLM
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

TOKENS = list(range(3, 40))


KINDS = (STORED, "q8_0", "q4_1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"))[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of packed weights, which here takes models of any size."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "packed"


def weights_of(checkpoint: Checkpoint, kind: str = "q8_0", threads: int = 1) -> Weights:
    return Weights.from_checkpoint(checkpoint, threads, kind)


def path_of(checkpoint: Checkpoint, kind: str = "q8_0") -> Path:
    path = packed_cache.entry_path(checkpoint, kind)
    assert path is not None
    return path


def packed(weights: Weights) -> list[np.ndarray]:
    projections = [weights.head]
    for layer in weights.layers:
        projections += [layer.attention_in, layer.attention_out, layer.mlp_in, layer.mlp_out]
    return [part.matrix.data for projection in projections for part in projection.parts]


def same(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(packed(one), packed(other), strict=True))


def is_kept(weights: Weights) -> bool:
    """Whether they were mapped from the cache: such memory is read-only."""
    return not any(data.flags.writeable for data in packed(weights))


def logits(checkpoint: Checkpoint) -> np.ndarray:
    layout = layout_for(checkpoint.spec, len(TOKENS), 16)
    formats = FACTORY.formats(checkpoint, FormatWish("q8_0"))
    assert isinstance(formats, Formats)
    backend = FACTORY.create(
        checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=64, threads=2, formats=formats)
    )
    try:
        return logits_by_prefill(backend, TOKENS, [30])
    finally:
        backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_maps_what_the_first_packed(model: Path, folder: Path, kind: str) -> None:
    checkpoint = load_checkpoint(model)
    first, second = weights_of(checkpoint, kind, threads=2), weights_of(checkpoint, kind)
    assert not is_kept(first) and is_kept(second)
    assert same(first, second) and first.notes == second.notes
    assert [path.name for path in folder.iterdir()] == [path_of(checkpoint, kind).name]


def test_logits_from_the_cache_are_the_same_bits(model: Path, folder: Path) -> None:
    assert np.array_equal(logits(load_checkpoint(model)), logits(load_checkpoint(model)))
    assert is_kept(weights_of(load_checkpoint(model)))


def test_a_key_for_each_form_and_file(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {path_of(load_checkpoint(model), kind) for kind in KINDS}
    copy = shutil.copytree(model, tmp_path / "copy")
    paths.add(path_of(load_checkpoint(copy)))
    file = copy / "model.safetensors"
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    paths.add(path_of(load_checkpoint(copy)))
    content = bytearray(file.read_bytes())
    content[-1] ^= 64  # the same size and, put back, the same time: the tensors' own bytes tell
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    paths.add(path_of(load_checkpoint(copy)))
    monkeypatch.setattr(packed_cache, "_builder_identity", lambda: b"another version of the packing code")
    paths.add(path_of(load_checkpoint(copy)))
    assert len(paths) == 7


def test_the_packing_code_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = packed_cache._builder_identity()
    read_bytes = Path.read_bytes

    def edited(path: Path) -> bytes:
        return read_bytes(path) + (b"# edited" if path.name == "packing.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    assert packed_cache._builder_identity.__wrapped__() != before


@pytest.mark.parametrize("variant", ["qwen3_next", "deepseek_v3", "quantised"])
def test_every_file_that_decides_the_bytes_is_counted(variant: str, tmp_path: Path) -> None:
    """By the code that runs while weights are placed and packed. The vectors of recurrent layers lie elsewhere."""
    if variant == "quantised":
        checkpoint = load_checkpoint(make_quantised("ct_nvfp4", tmp_path)[0])
    else:
        checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    own, ran = Path(packed_cache.__file__).parent, set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == own:
            ran.add(path.name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        weights_of(checkpoint, "q4_1")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {"weights.py", "packing.py"} < ran
    assert ran <= {*packed_cache.PLACING, *packed_cache.PACKING, "packed_cache.py", "recurrent.py"}


def test_tensors_that_no_file_holds_are_not_kept(model: Path, folder: Path) -> None:
    checkpoint = load_checkpoint(model)
    changed = replace(checkpoint, tensors=dict(checkpoint.tensors))
    assert packed_cache.entry_path(changed, "q8_0") is None
    weights_of(changed)
    assert not folder.exists()


def test_a_small_model_is_not_kept(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 1 << 30)
    assert packed_cache.entry_path(load_checkpoint(model), "q8_0") is None


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        "longer",
        "flipped",
        "zeroed page",
        "swapped pages",
        "swapped words",
        "two top bits",
        "moved by a sector",
        "sums",
        "trailer",
        "empty",
        "renamed",
    ],
)
def test_a_damaged_entry_is_packed_again(model: Path, folder: Path, damage: str) -> None:
    checkpoint = load_checkpoint(model)
    expected = weights_of(checkpoint)
    path = path_of(checkpoint)
    content = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            del content[-4096:]
        case "longer":
            content += bytes(64)
        case "flipped":
            content[5000] ^= 1
        case "zeroed page":
            content[4096:8192] = bytes(4096)
        case "swapped pages":
            content[:4096], content[8192:12288] = content[8192:12288], content[:4096]
        case "swapped words":
            content[:8], content[64:72] = content[64:72], content[:8]
        case "two top bits":  # a sum of words, weighted by odd numbers or not, is the same
            content[7] ^= 128
            content[15] ^= 128
        case "moved by a sector":
            content[512:8192] = content[0:7680]
        case "sums":
            content[-60] ^= 1
        case "trailer":
            content[-1] ^= 1
        case "empty":
            content.clear()
        case "renamed":  # another model's entry under this one's name
            weights_of(checkpoint, "q4_1")
            content[:] = path_of(checkpoint, "q4_1").read_bytes()
    assert content != path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    again = weights_of(checkpoint)
    assert not is_kept(again) and same(again, expected)
    assert f"the packed weights kept in {path} were damaged: packed again" in again.notes
    assert is_kept(weights_of(checkpoint)), "the damaged entry was not replaced"


def test_an_entry_of_the_right_size_and_the_wrong_name_is_refused(model: Path, folder: Path) -> None:
    checkpoint = load_checkpoint(model)
    weights_of(checkpoint)
    path = path_of(checkpoint)
    size = len(path.read_bytes())
    moved = path.rename(path.with_name("0" * 24 + "-" + "0" * 24))
    with pytest.raises(packed_cache.DamagedEntryError):
        packed_cache.read(moved, size - 56 - 4)


def test_weights_that_give_logits_that_are_not_finite_are_named_and_packed_anew(model: Path, folder: Path) -> None:
    """Whatever spoilt them, and passed the check: here, an entry that was written so."""
    weights_of(load_checkpoint(model))
    path = path_of(load_checkpoint(model))
    spoilt = np.full(len(path.read_bytes()) - 56 - 4, 0xFF, dtype=np.uint8)  # scales that are not numbers
    assert packed_cache.write(path, spoilt) is None
    errors = [error_of(load_checkpoint(model)) for _ in range(2)]
    assert f"not finite: the packed weights kept as packed/{path.name} in the cache folder" in str(errors[0])
    assert errors[1] is None


def test_a_file_that_gives_logits_that_are_not_finite_is_named(folder: Path, tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")[0]
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4096:] = b"\xff" * 4096
    file.write_bytes(content)
    assert f"not finite: {model.name} may be damaged" in str(error_of(load_checkpoint(model)))


def error_of(checkpoint: Checkpoint) -> str | None:
    """What a request for one token is told."""
    with LLM.from_assembly(assemble(checkpoint, None, EngineConfig(backend="cpu", quantise="q8_0"))) as llm:
        return llm.generate([TOKENS], SamplingParams(max_tokens=1))[0].error


def test_a_mapped_entry_survives_its_removal(model: Path, folder: Path) -> None:
    fresh = weights_of(load_checkpoint(model))
    kept = weights_of(load_checkpoint(model))
    shutil.rmtree(folder)
    assert is_kept(kept) and same(fresh, kept)


def note_of(weights: Weights) -> str:
    return " ".join(note for note in weights.notes if "not kept" in note)


def test_a_folder_that_cannot_be_written_is_done_without(model: Path, folder: Path) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file where the folder should be")
    assert "cannot be written" in note_of(weights_of(load_checkpoint(model)))


def test_a_full_disk_is_done_without(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert "No space left" in note_of(weights_of(load_checkpoint(model)))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert "has 0.0 MB left" in note_of(weights_of(load_checkpoint(model)))
    assert list(folder.iterdir()) == []
    assert not note_of(weights_of(load_checkpoint(model)))


def test_what_a_killed_process_left_is_cleared_and_a_writer_at_work_is_not(model: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    abandoned, at_work = folder / ".writing-old", folder / ".writing-new"
    abandoned.write_bytes(bytes(100))
    at_work.write_bytes(bytes(100))
    os.utime(abandoned, (1, 1))
    weights_of(load_checkpoint(model))
    assert not abandoned.exists() and at_work.exists()


def test_the_longest_unused_entries_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(4096, dtype=np.uint8)
    monkeypatch.setattr(kept_weights, "_FOLDER_LIMIT_BYTES", 4 * 4200)
    paths = [folder / f"source{index}-form" for index in range(5)]
    for index, path in enumerate(paths[:4]):
        assert packed_cache.write(path, data) is None
        os.utime(path, (1000 + index, 1000 + index))
    assert packed_cache.read(paths[0], len(data)) is not None  # used now
    assert packed_cache.write(paths[4], data) is None
    assert [path.exists() for path in paths] == [True, False, True, True, True]


def test_few_forms_of_one_source_are_kept(folder: Path) -> None:
    data = np.zeros(4096, dtype=np.uint8)
    for index in range(5):
        packed_cache.write(folder / f"source-form{index}", data)
        os.utime(folder / f"source-form{index}", (1000 + index, 1000 + index))
    packed_cache.write(folder / "other-form", data)
    assert sorted(path.name for path in folder.iterdir()) == [
        "other-form",
        "source-form2",
        "source-form3",
        "source-form4",
    ]


def test_many_at_once_write_and_read_whole_entries(folder: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    path, found = folder / "source-form", []

    def work() -> None:
        for _ in range(5):
            assert packed_cache.write(path, data) is None
            found.append(packed_cache.read(path, len(data)))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 20
    assert all(entry is not None and np.array_equal(entry, data) for entry in found)
    assert [entry.name for entry in folder.iterdir()] == ["source-form"]
