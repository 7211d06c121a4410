"""MTP blocks as files may hold them: missing, damaged, of another model, several, or of a family whose blocks are not
read. Each is refused, or told of, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.tiny_checkpoints import make_tiny
from tests.properties import examples
from tests.speculation.hybrids import llm_of
from tests.speculation.mtp_files import in_gguf
from tests.speculation.test_mtp import Made, with_block

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, ModelError
from twostroke.engine.build import prepare
from twostroke.models.heads.mtp import load_mtp, unused_blocks
from twostroke.models.heads.mtp_names import mtp_blocks, why_no_mtp
from twostroke.models.loading import load_checkpoint

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return with_block("qwen3_5", tmp_path_factory.mktemp("beside"))


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return with_block("glm4_moe", tmp_path_factory.mktemp("behind"))


def changed(made: Made, folder: Path, change: Change) -> Path:
    """The same model with other tensors."""
    folder.mkdir()
    tensors = load_file(made.folder / "model.safetensors")
    change(tensors)
    save_file({name: own.contiguous() for name, own in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((made.folder / "config.json").read_text())
    return folder


def without(part: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def shaped(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


LAYER = "mtp.layers.0."
BESIDE_DAMAGE: dict[str, tuple[Change, str]] = {
    "no input matrix": (without("mtp.fc."), r"the tensor mtp\.fc\.weight of its MTP block is missing"),
    "no input norm": (without("mtp.pre_fc_norm_hidden"), "pre_fc_norm_hidden.weight of its MTP block is missing"),
    "no last norm": (without("mtp.norm."), "MTP block: tensors are missing: final_norm"),
    "no keys": (without(f"{LAYER}self_attn.k_proj"), r"MTP block: tensors are missing: .*layers\.0\.k"),
    "no MLP": (without(f"{LAYER}mlp."), r"tensors are missing: layers\.0\.gate, layers\.0\.up, layers\.0\.down"),
    "the input of another width": (shaped("mtp.fc.weight", 64, 64), r"has shape \(64, 64\), and .* is needed"),
    "a vector for a matrix": (shaped("mtp.fc.weight", 128), r"has shape \(128,\), and .* is needed"),
    "a norm of another width": (shaped("mtp.norm.weight", 32), r"norm\.weight' has shape \(32,\), and the model"),
    "values of another width": (
        shaped(f"{LAYER}self_attn.v_proj.weight", 8, 64),
        r"v_proj\.weight' has shape \(8, 64\), and the model asks for",
    ),
    "a layer of another family": (shaped(f"{LAYER}mixer.in_proj.weight", 8, 64), "that a qwen3_5 model does not have"),
}


@pytest.mark.parametrize("damage", list(BESIDE_DAMAGE))
def test_a_damaged_block_is_refused_by_name(beside: Made, damage: str, tmp_path: Path) -> None:
    change, complaint = BESIDE_DAMAGE[damage]
    checkpoint = load_checkpoint(changed(beside, tmp_path / "m", change))
    with pytest.raises(ModelError, match=complaint) as caught:
        load_mtp(checkpoint)
    assert "\n" not in str(caught.value)


def test_a_block_that_is_not_there_is_said_to_be_missing(beside: Made, behind: Made, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"has no MTP block: its files hold no tensor named mtp\.\*"):
        load_mtp(load_checkpoint(changed(beside, tmp_path / "beside", without("mtp."))))
    with pytest.raises(BadRequestError, match=r"its files hold no tensor named model\.layers\.2\.\*"):
        load_mtp(load_checkpoint(changed(behind, tmp_path / "behind", without("layers.2."))))


def test_a_block_of_another_model_is_refused(behind: Made, tmp_path: Path) -> None:
    """Its own copy of the embedding tells."""
    for index, name in enumerate(("embed_tokens", "shared_head.head")):
        foreign = changed(behind, tmp_path / str(index), shaped(f"model.layers.2.{name}.weight", 300, 64))
        with pytest.raises(ModelError, match=r"belongs to another model: .* has shape \(300, 64\), and the model's"):
            load_mtp(load_checkpoint(foreign))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_file_that_ends_early_is_refused(behind: Made, beside: Made, kind: str, tmp_path: Path) -> None:
    """The model was read before: its files may have changed since."""
    path = in_gguf(beside, tmp_path / "tiny.gguf") if kind == "gguf" else changed(behind, tmp_path / "m", dict)
    checkpoint = load_checkpoint(path)
    file = path if kind == "gguf" else path / "model.safetensors"
    whole = file.read_bytes()
    other = tmp_path / "cut"
    other.write_bytes(whole[: int(0.9 * len(whole))])
    other.rename(file)  # the mapping of the old one stays as it is
    with pytest.raises(ModelError, match=r"truncated|corrupt|beyond|bytes"):
        load_mtp(checkpoint)


def test_a_gguf_file_without_the_block_that_it_declares(beside: Made, tmp_path: Path) -> None:
    path = in_gguf(beside, tmp_path / "whole.gguf")
    assert load_mtp(load_checkpoint(path)).source == str(path)
    raw = path.read_bytes()
    (tmp_path / "other.gguf").write_bytes(raw.replace(b"nextn.enorm", b"nextn.other"))
    with pytest.raises(ModelError, match=r"the tensor blk\.4\.nextn\.enorm\.weight of its MTP block is missing"):
        load_mtp(load_checkpoint(tmp_path / "other.gguf"))
    (tmp_path / "none.gguf").write_bytes(raw.replace(b"blk.4.", b"blk.9."))
    with pytest.raises(BadRequestError, match=r"its files hold no tensor named blk\.4\.\*"):
        load_mtp(load_checkpoint(tmp_path / "none.gguf"))


@pytest.fixture(scope="module")
def room(beside: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(beside, tmp_path_factory.mktemp("any") / "m", dict)


@examples(40)
@given(data=st.data())
def test_any_tensor_may_be_anything(beside: Made, room: Path, data: st.DataObject) -> None:
    """Read, or refused in a sentence."""
    tensors = load_file(beside.folder / "model.safetensors")
    name = data.draw(st.sampled_from([name for name in tensors if name.startswith("mtp.")]))
    shape = data.draw(st.lists(st.integers(0, 70), max_size=3))
    kind = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int32, torch.uint8, torch.float8_e4m3fn]))
    other = data.draw(st.sampled_from([name, f"{name}_scale_inv", "mtp.layers.1.x", "mtp.fc.bias", "mtp."]))
    save_file(tensors | {other: torch.zeros(shape).to(kind)}, room / "model.safetensors")
    try:
        load_mtp(replace(load_checkpoint(beside.folder), path=room))
    except (ModelError, BadRequestError) as error:
        assert 20 < len(str(error)) < 600 and "\n" not in str(error)


def test_of_several_blocks_the_first_makes_all_drafts(beside: Made, behind: Made, tmp_path: Path) -> None:
    for made, one, two in ((beside, LAYER, "mtp.layers.1."), (behind, "model.layers.2.", "model.layers.3.")):

        def doubled(tensors: Tensors, one: str = one, two: str = two) -> None:
            names = [name for name in tensors if name.startswith(one)]
            tensors.update({name.replace(one, two): 2 * tensors[name] for name in names})

        path = changed(made, tmp_path / two, doubled)
        found, alone = load_mtp(load_checkpoint(path)), load_mtp(load_checkpoint(made.folder))
        assert found.has_further and not alone.has_further
        assert found.tensors.keys() == alone.tensors.keys()
        for name, own in alone.tensors.items():
            assert np.array_equal(found.tensors[name].to_float32(), own.to_float32())
        with llm_of(path, "reference", "mtp") as llm:
            assert any("of the MTP blocks in its files the first" in note for note in llm.assembly.notes)


def test_blocks_that_nobody_asked_for_are_told_of(beside: Made, behind: Made, tmp_path: Path) -> None:
    config = EngineConfig(backend="reference", threads=1)
    checkpoint = load_checkpoint(behind.folder)
    told = [one for one in prepare(checkpoint, config).reasons if one.startswith("mtp")]
    assert told == ["mtp: its files hold an MTP block, which is not used; --speculate mtp has it draft"]
    assert unused_blocks(load_checkpoint(beside.folder)) is None  # its settings declare none
    assert unused_blocks(load_checkpoint(in_gguf(beside, tmp_path / "tiny.gguf"))) == told[0]
    gone = load_checkpoint(changed(behind, tmp_path / "gone", without("layers.2.")))
    assert unused_blocks(gone) is None


UNREAD = {
    "ernie4_5_moe": ({"num_nextn_predict_layers": 1}, "model.mtp_linear_proj.0.weight", "ernie4_5_moe"),
    "nemotron_h": ({"num_nextn_predict_layers": 1}, "mtp.layers.0.eh_proj.weight", "nemotron_h"),
    "minimax_m2": ({"num_mtp_modules": 3}, "model.layers.2.eh_proj.weight", "minimax_m2"),
    "deepseek_v2": ({"num_nextn_predict_layers": 1}, "model.layers.3.eh_proj.weight", "deepseek_v2"),
}


@pytest.mark.parametrize("variant", list(UNREAD))
def test_blocks_of_other_families_are_told_of_and_refused(variant: str, tmp_path: Path) -> None:
    settings, name, family = UNREAD[variant]
    path, model = make_tiny(variant, tmp_path)
    num_layers = model.config.num_hidden_layers
    name = name.replace("layers.2.", f"layers.{num_layers}.").replace("layers.3.", f"layers.{num_layers}.")
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(8, 16)}, file, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | settings))
    checkpoint = load_checkpoint(path)
    told = unused_blocks(checkpoint)
    assert told is not None and "not used: this engine computes those of DeepSeek V3, " in told and family in told
    with pytest.raises(BadRequestError, match=f"{checkpoint.name} declares .*this engine computes none of them yet"):
        load_mtp(checkpoint)


def test_blocks_are_counted_as_settings_say() -> None:
    assert mtp_blocks({"num_nextn_predict_layers": 1}) == 1
    assert mtp_blocks({"text_config": {"mtp_num_hidden_layers": 2}}) == 2
    assert mtp_blocks({"deepseek2.nextn_predict_layers": 1}) == 1
    assert mtp_blocks({"num_nextn_predict_layers": "many"}) == 0
    assert "computes none" in why_no_mtp("m", {"num_nextn_predict_layers": 1})
    assert "has no MTP blocks" in why_no_mtp("m", {})
