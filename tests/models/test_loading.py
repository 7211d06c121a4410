"""From files to a Checkpoint: which tensors must be there, what may be beside them, and that nothing is copied that
need not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny_checkpoints import make_tiny, variants
from tests.models.tiny_gguf import write_gguf

from twostroke.core.errors import ModelError
from twostroke.models.canonical import canonical_tensors
from twostroke.models.families import family_of_gguf
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.gguf import open_gguf
from twostroke.models.weights.safetensors import open_folder
from twostroke.models.weights.tensor import WeightTensor

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Save the folder's tensors again after `change` has been at them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path)[0]


@pytest.mark.parametrize("variant", variants())
def test_exactly_the_tensors_of_the_spec(variant: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == checkpoint.spec.tensor_shapes()
    assert checkpoint.gguf_metadata is None


def test_names(llama: Path) -> None:
    assert load_checkpoint(llama).name == llama.name
    assert load_checkpoint(llama, name="mine").name == "mine"


def test_weights_stay_in_the_memory_map(tmp_path: Path) -> None:
    folder, model = make_tiny("phi3_longrope", tmp_path / "folder")
    stored = open_folder(folder)
    checkpoint = load_checkpoint(folder)
    assert stored["model.layers.0.self_attn.qkv_proj.weight"].data.base is not None
    for name in ("q", "k", "v", "gate", "up", "down"):  # split rows of fused matrices, too
        data = checkpoint.tensors[f"layers.0.{name}"].data
        assert not data.flags.owndata
        assert not data.flags.writeable
    as_gguf = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf"))
    assert not as_gguf.tensors["layers.0.q"].data.flags.owndata


def test_fused_matrices_are_split_in_order(tmp_path: Path) -> None:
    folder, model = make_tiny("phi3", tmp_path)
    checkpoint = load_checkpoint(folder)
    fused = model.state_dict()["model.layers.1.self_attn.qkv_proj.weight"].numpy()
    parts = [checkpoint.tensors[f"layers.1.{name}"].to_float32() for name in "qkv"]
    assert [part.shape[0] for part in parts] == [64, 32, 32]
    np.testing.assert_array_equal(np.concatenate(parts), fused)


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral"])
def test_experts_in_stacks_are_the_experts_one_by_one(variant: str, tmp_path: Path) -> None:
    """As transformers holds them, as llama.cpp's converter writes them, and as the Hub has them."""
    folder, model = make_tiny(variant, tmp_path / "folder")
    expected = load_checkpoint(folder)
    as_gguf = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf"))
    assert (as_gguf.spec.family, as_gguf.spec.moe) == (expected.spec.family, expected.spec.moe)
    save_file(model.state_dict(), folder / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in open_folder(folder)
    for other in (load_checkpoint(folder), as_gguf):
        for name, tensor in expected.tensors.items():
            np.testing.assert_array_equal(other.tensors[name].to_float32(), tensor.to_float32(), err_msg=name)
        assert not other.tensors["layers.1.experts.2.up"].data.flags.owndata


def test_experts_of_early_gguf_files_are_a_tensor_each(tmp_path: Path) -> None:
    _, model = make_tiny("mixtral", tmp_path)
    file = open_gguf(write_gguf(model, tmp_path / "tiny.gguf"))
    stored: dict[str, WeightTensor] = {}
    for name, tensor in file.tensors.items():
        if "_exps." not in name:
            stored[name] = tensor
            continue
        experts, rows, _ = tensor.shape
        flat = WeightTensor(name, tensor.kind, (experts * rows, tensor.shape[2]), tensor.data)
        for expert in range(experts):
            part = flat.rows(expert * rows, (expert + 1) * rows)
            stored[name.replace("_exps.", f".{expert}.")] = part
    expected = load_checkpoint(tmp_path / "tiny.gguf")
    found = canonical_tensors("tiny.gguf", stored, family_of_gguf("llama").gguf_names, expected.spec)
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found[name].to_float32(), tensor.to_float32(), err_msg=name)


@pytest.mark.parametrize("shape", [(3, 192, 64), (4 * 192, 64), (4, 96, 64)])
def test_a_misshapen_stack_of_experts_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder, model = make_tiny("mixtral", tmp_path)
    state = {**model.state_dict(), "model.layers.1.mlp.experts.gate_up_proj": torch.zeros(shape)}
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1\.mlp\.experts\.gate_up_proj' has shape"):
        load_checkpoint(folder)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder, _ = make_tiny("qwen3_moe", tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing: layers\.2\.experts\.5\.up$"):
        load_checkpoint(folder)


def test_gguf_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    folder, model = make_tiny("llama_bias", tmp_path)
    path = write_gguf(model, tmp_path / "tiny.gguf")
    ours, theirs = load_checkpoint(path).tensors, load_checkpoint(folder).tensors
    stored = open_gguf(path).tensors["blk.0.attn_q.weight"].to_float32()
    assert not np.array_equal(stored, theirs["layers.0.q"].to_float32())
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name].to_float32(), tensor.to_float32(), err_msg=name)


def test_half_precision_folders_load_as_stored(tmp_path: Path) -> None:
    folder, _ = make_tiny("llama", tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    tensor = load_checkpoint(folder).tensors["layers.0.gate"]
    assert tensor.kind.name == "BF16"
    assert tensor.nbytes == 96 * 64 * 2


def test_missing_tensors_are_named(llama: Path) -> None:
    rewrite(llama, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name])
    with pytest.raises(ModelError, match=r"missing: layers\.1\.attention_norm, .* and 5 more"):
        load_checkpoint(llama)


def test_misshapen_tensors_are_named(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 32)}))
    with pytest.raises(ModelError, match=r"up_proj.weight' has shape \(96, 32\), and the model asks for \(96, 64\)"):
        load_checkpoint(llama)


def test_a_transposed_vector_is_misshapen(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(1, 64)}))
    with pytest.raises(ModelError, match=r"norm.weight' has shape \(1, 64\)"):
        load_checkpoint(llama)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",  # the config says there is none
        "model.layers.3.mlp.up_proj.weight",  # beyond the last layer
        "something_else",
    ],
)
def test_tensors_that_would_be_passed_over_are_refused(llama: Path, name: str) -> None:
    rewrite(llama, lambda tensors: tensors.update({name: torch.zeros(96, 64)}))
    with pytest.raises(ModelError, match="tensors that a llama model does not have: " + name):
        load_checkpoint(llama)


def test_rotary_tables_of_old_checkpoints_are_passed_over(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_checkpoint(llama)


def test_a_tied_model_uses_its_embedding_whatever_lies_beside_it(tmp_path: Path) -> None:
    folder, _ = make_tiny("llama_tied", tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(256, 64)}))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.spec.tied_embeddings
    assert "output" not in checkpoint.tensors


def test_an_untied_model_needs_its_output(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing: output$"):
        load_checkpoint(llama)


def test_a_name_given_twice_is_refused(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({"model.layers.00.input_layernorm.weight": torch.zeros(64)}))
    with pytest.raises(ModelError, match=r"layers\.0\.attention_norm a second time"):
        load_checkpoint(llama)


def test_gguf_tied_embeddings_and_vocabulary(tmp_path: Path) -> None:
    _, tied = make_tiny("llama_tied", tmp_path / "a")
    _, untied = make_tiny("llama", tmp_path / "b")
    checkpoint = load_checkpoint(write_gguf(tied, tmp_path / "tied.gguf"))
    assert checkpoint.spec.tied_embeddings
    assert checkpoint.spec.vocab_size == 256
    assert checkpoint.name == "tied"
    assert checkpoint.gguf_metadata is not None
    assert not load_checkpoint(write_gguf(untied, tmp_path / "untied.gguf")).spec.tied_embeddings


def test_gguf_gemma3_patterns(tmp_path: Path) -> None:
    _, model = make_tiny("gemma3", tmp_path / "folder")
    flags = [False, True, True, False]
    spec = load_checkpoint(
        write_gguf(model, tmp_path / "a.gguf", **{"attention.sliding_window_pattern": flags, "rope.freq_base_swa": 5e3})
    ).spec
    assert [layer.window is not None for layer in spec.layers] == flags
    assert [layer.grouped.rope.theta for layer in spec.layers] == [1e6, 5e3, 5e3, 1e6]
    by_rule = load_checkpoint(write_gguf(model, tmp_path / "b.gguf")).spec
    assert [layer.window is not None for layer in by_rule.layers] == [True] * 4  # the first full one would be the sixth
    with pytest.raises(ModelError, match="a flag for each of the 4 layers"):
        load_checkpoint(write_gguf(model, tmp_path / "c.gguf", **{"attention.sliding_window_pattern": [True]}))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 10_000 + "}", "not valid JSON"),
        ("{}", "architectures must be a list of one name, not None"),
        ('{"architectures": []}', "architectures must be a list of one name"),
        ('{"architectures": ["A", "B"]}', "architectures must be a list of one name"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures must be a list of one name"),
        ('{"architectures": ["T5Model"]}', "'T5Model' is not supported; known are: BertModel"),
        ('{"architectures": ["LlamaForCausalLM"]}', "is missing"),
    ],
)
def test_configs_that_are_none(llama: Path, text: str, complaint: str) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(ModelError, match=complaint):
        load_checkpoint(llama)


def test_config_that_is_not_text(llama: Path) -> None:
    (llama / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_checkpoint(llama)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        load_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_checkpoint(tmp_path)


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    for value in ("mamba", None):
        path = tmp_path / f"{value}.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        if value is None:
            writer.kv_data[0].pop("general.architecture")
            writer.add_uint32("general.architecture", 7)
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match="'mamba' is not supported; known are: bert" if value else "must be a str"):
            load_checkpoint(path)


def test_a_part_of_a_split_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"part\.gguf is one part of a model split in 3 GGUF files; merge them into one first"
    ):
        load_checkpoint(path)


def test_a_config_with_another_size_than_its_tensors(llama: Path) -> None:
    config: dict[str, Any] = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"does not have: model\.layers\.2\."):
        load_checkpoint(llama)


def test_keys_and_values_of_layers_that_read_others_are_left_out(tmp_path: Path) -> None:
    """Published Gemma 4's hold them."""
    folder, _ = make_tiny("gemma4", tmp_path)
    before = load_checkpoint(folder)

    def give_them_kv(tensors: Tensors) -> None:
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.ones_like(
                tensors[f"model.layers.2.self_attn.{part}.weight"]
            )

    assert set(load_checkpoint(rewrite(folder, give_them_kv)).tensors) == set(before.tensors)
    assert not any(name.startswith("layers.5.k") for name in before.tensors)
    with pytest.raises(ModelError, match=r"does not have: model\.layers\.2\.self_attn\.k_proj\.bias"):
        load_checkpoint(
            rewrite(folder, lambda tensors: tensors.update({"model.layers.2.self_attn.k_proj.bias": torch.ones(128)}))
        )
