"""Heads are read as others publish them, and what is cut short, damaged or made for another model is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.heads.published import (
    DRAFT_VOCAB_SIZE,
    HIDDEN_SIZE,
    TAPS,
    VOCAB_SIZE,
    PublishedHead,
    medusa_tensors,
)

from twostroke.core.errors import ModelError
from twostroke.models.heads.eagle3 import default_taps, load_eagle3
from twostroke.models.heads.medusa import load_medusa
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, ModelSpec


def target(hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, num_layers=4):
    layer = LayerSpec(GroupedAttention(4, 2, 16, RopeSpec(1e4, 16)), DenseMlp(96))
    return ModelSpec("llama", vocab_size, hidden_size, 256, (layer,) * num_layers, 1e-5)


@pytest.fixture
def head():
    torch.manual_seed(1)
    return PublishedHead()


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_both_layouts_give_the_same_head(tmp_path, layout, kind):
    torch.manual_seed(1)
    published = PublishedHead(kind, embedding=True, norm_before_residual=True, fc_norm=True)
    read = load_eagle3(published.save(tmp_path / "head", layout), target())
    assert read.spec.taps == tuple(TAPS)
    assert (read.spec.norm_before_residual, read.spec.fc_norm, read.spec.norm_before_fc) == (True, True, False)
    assert read.spec.layer.grouped.qk_norm == (kind == "qwen3")
    assert set(read.tensors) >= set(read.spec.tensor_shapes()) | {"embedding", "output"}
    assert np.array_equal(read.tensors["fc"].to_float32(), published.fc.weight.detach().numpy())
    assert np.array_equal(read.target_ids, published.target_ids.numpy())


def test_what_a_head_leaves_out_is_the_targets(tmp_path, head):
    read = load_eagle3(head.save(tmp_path / "head"), target())
    assert "embedding" not in read.tensors and "output" in read.tensors


def test_layer_ids_are_of_what_enters_a_layer_and_nested_ones_of_what_leaves_it(tmp_path, head):
    nested = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    folder = head.save(tmp_path / "head", eagle_aux_hidden_state_layer_ids=None, **nested)
    assert load_eagle3(folder, target()).spec.taps == (1, 2, 3)
    folder = head.save(tmp_path / "plain", eagle_aux_hidden_state_layer_ids=None)
    assert load_eagle3(folder, target(num_layers=32)).spec.taps == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27) and default_taps(4) == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": 128}, "belongs to another model: its hidden size is 128, the model's 64"),
        ({"vocab_size": 512}, "belongs to another model: its vocabulary is 512, the model's 256"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and heads of one layer are read"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 2]}, "integers from 0 to 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "names a layer twice"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc has shape"),
        ({"draft_vocab_size": 95}, "output has shape"),
        ({"speculators_model_type": "dflash"}, "an EAGLE-3 head is asked for"),
        ({"mask_token_id": 3}, "drafts several tokens at once"),
        ({"fc_norm": True, "norm_before_fc": True}, "one of them can hold"),
        ({"fc_norm": True}, "the tensor fc_norm.0 is missing"),
        ({"intermediate_size": 64}, "(gate|up|down) has shape"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, head, changes, complaint):
    with pytest.raises(ModelError, match=complaint):
        load_eagle3(head.save(tmp_path / "head", **changes), target())


def _rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), "the tensor up is missing"),
        (lambda tensors: tensors.pop("d2t"), "the table d2t is missing"),
        (lambda tensors: tensors.pop("lm_head.weight"), "the tensor output is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "'extra' is none that such a head has"),
        (lambda tensors: tensors["d2t"].add_(200), "outside the model's vocabulary"),
        (lambda tensors: tensors.update(d2t=-torch.arange(DRAFT_VOCAB_SIZE)), "twice to one token"),
        (lambda tensors: tensors["t2d"].logical_not_(), "name different tokens"),
        (lambda tensors: tensors.update(t2d=torch.zeros(8, dtype=torch.bool)), "t2d has shape"),
        (lambda tensors: tensors.update(d2t=torch.zeros(8, dtype=torch.int64)), "d2t has shape"),
        (lambda tensors: tensors.update(mask_hidden=torch.zeros(3)), "none that such a head has"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, head, change, complaint):
    with pytest.raises(ModelError, match=complaint):
        load_eagle3(_rewritten(head.save(tmp_path / "head"), change), target())


def test_a_truncated_file_and_no_file_are_refused(tmp_path, head):
    folder = head.save(tmp_path / "head")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="is truncated"):
        load_eagle3(folder, target())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        load_eagle3(folder, target())
    with pytest.raises(ModelError, match="there is no EAGLE-3 head at"):
        load_eagle3(tmp_path / "nowhere", target())


def test_pickle_is_refused_with_the_way_to_convert_it(tmp_path, head):
    folder = head.save(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only; pickle files are never read.*save_file"):
        load_eagle3(folder, target())


@pytest.mark.parametrize("vllm_names", [False, True])
def test_medusa_heads_are_read(tmp_path, vllm_names):
    torch.manual_seed(2)
    tensors = medusa_tensors(3, 2, vllm_names)
    settings = {"num_heads": 3, "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256}
    own = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}
    (tmp_path / "config.json").write_text(json.dumps(settings if vllm_names else own))
    save_file(tensors, tmp_path / ("model.safetensors" if vllm_names else "medusa_lm_head.safetensors"))
    read = load_medusa(tmp_path, target())
    assert (read.spec.num_heads, read.spec.num_blocks) == (3, 2)
    stored = tensors["lm_heads.2.weight" if vllm_names else "2.2.weight"]
    assert np.array_equal(read.tensors["2.output"].to_float32(), stored.numpy())
    assert read.tensors["1.blocks.1_bias"].shape == (HIDDEN_SIZE,)
    with pytest.raises(ModelError, match="belongs to another model: its hidden size is 64, the model's 32"):
        load_medusa(tmp_path, target(hidden_size=32))


def test_medusa_heads_that_are_not_whole_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 1}))
    save_file(medusa_tensors(3, 1, False), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=r"the tensor 3\.blocks\.0 is missing"):
        load_medusa(tmp_path, target())
