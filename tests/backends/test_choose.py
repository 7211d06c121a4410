"""Which backend is taken, and the sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.tiny_checkpoints import make_tiny

from twostroke import backends
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError
from twostroke.core.formats import STORED, FormatWish
from twostroke.engine.build import assemble
from twostroke.models.loading import load_checkpoint


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "twostroke.backends.cuda.device_here.none_found", lambda: "there is no NVIDIA driver on this machine"
    )


@pytest.mark.usefixtures("no_cuda")
def test_the_reason_reads_as_a_sentence(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    factory, reason = backends.choose("auto", checkpoint)
    assert factory.name == "cpu"
    assert reason == "the fastest that supports this model (not cuda: there is no NVIDIA driver on this machine)"
    assert backends.choose("reference", checkpoint)[1] == "asked for"


@pytest.mark.usefixtures("no_cuda")
def test_a_size_that_the_tiles_cannot_take_is_named(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path, intermediate_size=100)[0])
    expected = "not cpu: its tiles need sizes that are multiples of 32, and this model's intermediate size is 100"
    assert expected in backends.choose("auto", checkpoint)[1]
    with pytest.raises(BackendError, match=r"^no backend can run this model here; not cpu: its tiles need sizes"):
        backends.choose("cpu", checkpoint)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("wish", "taken", "passed_over"),
    [
        (FormatWish("q8_0"), "cpu", ""),
        (FormatWish(STORED), "cpu", ""),
        (FormatWish(kv="int8"), "cpu", ""),
        (FormatWish(arithmetic="f32"), "reference", "not cpu: its arithmetic follows the weights' kind"),
        (FormatWish(kv="f32"), "reference", "not cpu: it keeps KV in f16, bf16, int8, not in f32"),
    ],
)
def test_every_wish_steers_the_choice(tmp_path: Path, wish: FormatWish, taken: str, passed_over: str) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    factory, reason = backends.choose("auto", checkpoint, wish)
    assert factory.name == taken
    assert reason.startswith("the fastest that supports this model in the formats asked for (not cuda: ")
    assert passed_over in reason


@pytest.mark.usefixtures("no_cuda")
def test_a_wish_that_nobody_has_is_declined_by_each_with_a_sentence(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    with pytest.raises(BackendError) as raised:
        backends.choose("auto", checkpoint, FormatWish(weights="q8_0", arithmetic="f32"))
    assert "; not cpu: its arithmetic follows" in str(raised.value)
    assert "; not reference: it multiplies by the weights as they are stored" in str(raised.value)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("config", [EngineConfig(dtype="f32"), EngineConfig(kv=KVConfig(kind="f32"))])
def test_an_engine_is_built_by_whoever_has_what_was_asked_for_and_says_why(
    tmp_path: Path, config: EngineConfig
) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    assembly = assemble(checkpoint, None, config)
    try:
        assert (assembly.backend_name, assembly.formats.arithmetic, assembly.formats.kv) == ("reference", "f32", "f32")
        assert any(note.startswith("backend reference: the fastest") and "not cpu: " in note for note in assembly.notes)
    finally:
        assembly.engine.close()


@pytest.mark.usefixtures("no_cuda")
def test_ranks_are_never_given_a_slower_backend_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    factory, _ = backends.choose("auto", checkpoint, ranks=2)
    assert factory.name == "cpu"
    sentence = "the cpu backend runs this model, but not with --tensor-parallel 4: 4 heads cannot .* for 2"
    with pytest.raises(BackendError, match=f"^{sentence} ranks; --backend names another$"):
        backends.choose("auto", checkpoint, ranks=4)  # the reference would
    assert backends.choose("reference", checkpoint, ranks=4)[0].name == "reference"
    with pytest.raises(BackendError, match="its ranks meet in shared memory, and --rank-transport is for"):
        backends.choose("cpu", checkpoint, ranks=2, transport="gloo")
    monkeypatch.setattr("twostroke.backends.cuda.FACTORY.supports", lambda checkpoint: None)
    monkeypatch.setattr("twostroke.backends.cuda.FACTORY.num_cards", lambda: 1)
    with pytest.raises(BackendError, match=r"^the cuda backend .* with --tensor-parallel 2: 2 ranks need a card each"):
        backends.choose("auto", checkpoint, ranks=2)
