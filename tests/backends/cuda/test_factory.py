"""What the backend says of a machine and a model before it is made: on a machine that need not have a card."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends import cuda
from twostroke.backends.cuda import FACTORY, backend, device_here
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.interface import BackendSettings
from twostroke.core.errors import BackendError
from twostroke.core.formats import PACKED, STORED, Formats, FormatWish
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.cost.model_shape import DecodeWeights, WeightCopies
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.decoder import with_attention
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, LatentAttention, LayerSpec, ModelSpec
from twostroke.models.weights.tensor import WeightKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))[0]


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return load_checkpoint(folder)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The machine is asked once a process; here it is another one each time."""
    device_here.none_found.cache_clear()
    yield
    device_here.none_found.cache_clear()


class Driver:
    """A driver's library that finds so many devices."""

    def __init__(self, num_devices: int, initialised: int = 0) -> None:
        self._num_devices, self._initialised = num_devices, initialised

    def cuInit(self, flags: int) -> int:  # noqa: N802  (the driver's names)
        return self._initialised

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self._num_devices
        return 0


@pytest.mark.usefixtures("asked_anew")
def test_it_needs_its_packages(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_here, "find_spec", lambda name: None if name == "triton" else object())
    reason = FACTORY.supports(checkpoint)
    assert reason is not None and reason.startswith("torch and triton are not installed; pip install '.[cuda]'")


@pytest.mark.usefixtures("asked_anew")
def test_it_needs_a_driver_and_a_device(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert FACTORY.supports(checkpoint) == "there is no NVIDIA driver on this machine"
    for driver in (Driver(0), Driver(1, initialised=100)):
        device_here.none_found.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda name, driver=driver: driver)
        assert FACTORY.supports(checkpoint) == "the NVIDIA driver finds no device"


@pytest.mark.usefixtures("asked_anew")
def test_it_needs_a_torch_and_a_card_that_can(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert FACTORY.supports(checkpoint) == "torch finds no CUDA device: is it a build without CUDA?"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert FACTORY.supports(checkpoint) == "it needs compute capability 8.0 or newer, and this device has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert FACTORY.supports(checkpoint) is None


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 72}, "its attention needs a head size of a multiple of 16 up to 512, not 72"),
        ({"head_dim": 528}, "its attention needs a head size of a multiple of 16 up to 512, not 528"),
        ({"num_heads": 34}, "its attention shares a key among 16 queries at most, not 17"),
    ],
)
def test_it_declines_shapes_that_its_kernels_do_not_have(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], sentence: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1))
    assert FACTORY.supports(replace(checkpoint, spec=with_attention(checkpoint.spec, **changes))) == sentence


@pytest.mark.usefixtures("asked_anew")
def test_it_quantises_to_what_it_has_kernels_for(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1))
    for weights in ("q4_0", "q4_k", "nvfp4"):
        declined = FACTORY.formats(checkpoint, FormatWish(weights))
        assert declined == f"it brings weights to fp8, int4, q8_0, q4_1 as it loads them, not to {weights}"
    assert FACTORY.preferred_weights == ()
    for weights, arithmetic in (("fp8", "fp8"), ("int4", "bf16"), ("q8_0", "bf16"), ("q4_1", "bf16")):
        found = FACTORY.formats(checkpoint, FormatWish(weights))
        assert isinstance(found, Formats)
        assert (found.weights, found.arithmetic, found.kv) == (weights, arithmetic, "bf16")
        for other in (FormatWish(weights, arithmetic="f16"), FormatWish(weights, kv="f16")):
            assert FACTORY.formats(checkpoint, other) == f"with weights in {weights} it computes and keeps KV in bf16"
    assert isinstance(FACTORY.formats(checkpoint, FormatWish(STORED)), Formats)


SLOW_BEFORE_HOPPER = "decode reads few bits fast on Hopper alone; --quantise none holds them as they are stored"


@pytest.mark.parametrize(
    ("kind", "name"),
    [(WeightKind.F16, "f16"), (WeightKind.BF16, "bf16"), (WeightKind.F32, "bf16"), (WeightKind.Q8_0, "bf16")],
)
def test_it_computes_in_what_the_weights_are_stored_in(
    folder: Path, kind: WeightKind, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Hopper, where those in few bits are brought to 16."""
    monkeypatch.setattr("twostroke.backends.cuda.device_here.reads_few_bits", lambda: False)
    checkpoint = random_checkpoint(folder, kind)
    assert FACTORY.formats(checkpoint) == Formats(name, name, name, stored=kind.name)
    for asked, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        found = FACTORY.formats(checkpoint, FormatWish(arithmetic=asked))
        assert found == Formats(asked, asked, asked, stored=kind.name)
        assert backend.DTYPES[asked] == dtype
    for other in ("fp8", "int8", "f32"):
        is_of_few_bits = other == "fp8" and kind is WeightKind.Q8_0
        why = f", nor by weights as they are stored: {SLOW_BEFORE_HOPPER}" if is_of_few_bits else ""
        assert FACTORY.formats(checkpoint, FormatWish(arithmetic=other)) == (
            f"it computes in bf16 or f16, not in {other}{why}"
        )


def test_kv_takes_two_bytes_a_number_and_f32_is_declined(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    for kind in ("f16", "bf16"):
        found = FACTORY.kv_bytes_per_token(checkpoint, (0, 2), Formats.of(kind, kind))
        assert found == 2 * 2 * spec.layers[0].grouped.kv_values
    assert FACTORY.formats(checkpoint, FormatWish(kv="f32")) == (
        "it keeps KV in what it computes in, bf16 or f16, or in fp8 or int8, not in f32"
    )


@pytest.mark.parametrize(("arithmetic", "kv"), [("f16", "bf16"), ("bf16", "f16"), (None, "f16")])
def test_kv_of_another_kind_than_the_arithmetic_is_declined(
    checkpoint: Checkpoint, arithmetic: str | None, kv: str
) -> None:
    """Before any weight is loaded."""
    declined = FACTORY.formats(checkpoint, FormatWish(arithmetic=arithmetic, kv=kv))
    assert isinstance(declined, str) and f"{kv} needs --dtype {kv}" in declined


def test_blocks_of_no_power_of_two_are_refused(checkpoint: Checkpoint) -> None:
    layout = KVLayout(48, (KVGroup((0, 1, 2), None, 4),))
    with pytest.raises(BackendError, match="power of two tokens, not 48"):
        FACTORY.create(checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=16))


@pytest.mark.parametrize("packs", [False, True])
def test_running_out_of_memory_names_what_takes_it(folder: Path, monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    def no_memory(*arguments: Any, **options: Any) -> None:
        assert (options["formats"].copies == PACKED) is packs
        raise torch.cuda.OutOfMemoryError

    copies = DecodeWeights(WeightCopies(12_000_000_000, 16_000_000_000, 128), None)
    monkeypatch.setattr(cuda.CudaFactory, "decode_weights", lambda self, checkpoint, formats: copies)
    monkeypatch.setattr(backend, "CudaBackend", no_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3_000_000_000, 24_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    layout = KVLayout(16, (KVGroup((0, 1, 2), None, 4),))
    formats = Formats("bf16", "bf16", "bf16", copies=PACKED if packs else None)
    with pytest.raises(BackendError) as raised:
        FACTORY.create(
            load_checkpoint(folder), layout, BackendSettings(max_context=64, max_tokens_per_step=16, formats=formats)
        )
    sentence = str(raised.value)
    assert "A GPU ran out of memory" in sentence and "of its 24.0, 3.0 GB were left" in sentence
    assert ("and packed copies of them 12.0 GB" in sentence) is packs
    assert ("spare the copies with --decode-weights plain" in sentence) is packs


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_weights_arrive_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", StringIO())
    assert cuda._progress_line() is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    show = cuda._progress_line()
    assert show is not None
    show(500_000_000, 2_000_000_000)
    show(2_000_000_000, 2_000_000_000)
    assert terminal.getvalue() == "\rweights: 0.5 of 2.0 GB\rweights: 2.0 of 2.0 GB\n"


def test_kv_has_a_block_more_than_the_ledger_hands_out(checkpoint: Checkpoint, device: str) -> None:
    spec, attention = checkpoint.spec, checkpoint.spec.layers[0].grouped
    layout = KVLayout(16, (KVGroup((0, 2), None, 5), KVGroup((1,), 32, 3)))
    store = KVStore(spec, layout, torch.device(device), torch.bfloat16)
    assert store.group_of == (0, 1, 0) and store.block_size == 16
    shapes = [(blocks, attention.num_kv_heads, 16, attention.head_dim) for blocks in (6, 4, 6)]
    assert [tuple(keys.shape) for keys in store.keys] == [tuple(values.shape) for values in store.values] == shapes
    assert not any(tensor.count_nonzero() for tensor in (*store.keys, *store.values))
    assert len({tensor.data_ptr() for tensor in (*store.keys, *store.values)}) == 6


def test_latents_are_one_tensor_a_layer_and_travel_as_others_do(device: str) -> None:
    own = LatentAttention(4, 32, 16, 8, 16, RopeSpec(1e4, 8))
    spec = ModelSpec("made_up", 32, 64, 128, (LayerSpec(own, DenseMlp(96)),) * 2, 1e-5)
    store = KVStore(spec, KVLayout(16, (KVGroup((0, 1), None, 5),)), torch.device(device), torch.float32)
    assert [tuple(part.shape) for parts in store.parts for part in parts] == [(6, 16, 40)] * 2
    (form,) = store.block_formats()
    assert form.num_bytes == 2 * 16 * 40 * 4 and ("latent", 1) in form.axes
    for layer, (part,) in enumerate(store.parts):
        part[3] = 1.0 + layer
    store.scatter(0, (0, 1), [1], store.gather(0, [3]))
    assert [float(part[1].sum()) for (part,) in store.parts] == [640.0, 1280.0]
    checkpoint = Checkpoint("made up", Path("made_up"), spec, {})
    assert FACTORY.kv_bytes_per_token(checkpoint, (0, 1), Formats.of("bf16")) == 2 * 40 * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card to measure")
def test_ceilings_are_measured_on_the_card(checkpoint: Checkpoint) -> None:
    ceilings = FACTORY.ceilings(checkpoint, 1, Formats.of("bf16"))
    assert 1e11 < ceilings.read_bytes_per_s < 2e13
    assert 1e12 < ceilings.multiply_adds_per_s < 1e16
    figures = FACTORY.measured_limits()
    assert {"copy TB/s", "read TB/s", "bf16 TFLOP/s", "kernel launch us"} < set(figures)
    assert all(value > 0 for value in figures.values() if not isinstance(value, str))
    assert ceilings.read_bytes_per_s == pytest.approx(1e12 * max(figures["copy TB/s"], figures["read TB/s"]))
    space = FACTORY.memory(checkpoint, None, Formats.of("bf16"), FACTORY.suits)  # type: ignore[arg-type]  # a host's memory is not looked at
    assert 0 < space.free_beside_weights_bytes < space.total_bytes
