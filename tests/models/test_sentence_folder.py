"""What the files of sentence-transformers say, and what of it is refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.tiny_embedders import make_embedder, make_reranker

from twostroke.core.errors import ModelError
from twostroke.core.vectors import score_of
from twostroke.models.loading import load_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder("gemma3", tmp_path_factory.mktemp("gemma3"), prompts={"query": "q: "}).folder


def changed(path: Path, change: Any) -> str:
    before = path.read_text()
    value = json.loads(before)
    path.write_text(json.dumps(value | change if isinstance(change, dict) else change(value)))
    return before


def test_a_folder_is_read(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    pooling = checkpoint.pooling
    assert pooling is not None and pooling.states == "mean" and pooling.normalises
    assert [step.weight.shape for step in pooling.steps] == [(96, 64), (32, 96)]
    assert pooling.facts.dimensions == 32 and pooling.facts.prompts == {"query": "q: "}
    spec = checkpoint.spec
    assert not spec.is_causal and not spec.has_output and spec.max_context == 60
    assert [layer.window for layer in spec.layers] == [5, None, 5]  # 9 in all, ahead and back


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "asks for nothing"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_median_tokens": True},
            "asks for pooling_mode_mean_tokens and pooling_mode_median_tokens; understood are pooling_mode_cls_token",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "is 'median'; understood are cls"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", 3]}, "understood are cls"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "understood are cls"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": ["cls", "mean"]},
            "in_features is 64, and what comes before has 128",
        ),
        ("1_Pooling/config.json", {"include_prompt": False}, "leaves a prompt's tokens out"),
        ("2_Dense/config.json", {"in_features": 65}, "in_features is 65, and what comes before has 64"),
        ("2_Dense/config.json", {"out_features": 95}, r"has shape \(96, 64\), and \(95, 64\) is asked for"),
        ("2_Dense/config.json", {"bias": True}, "asked for are linear.weight, linear.bias"),
        ("3_Dense/config.json", {"activation_function": "torch.nn.SiLU"}, "is 'torch.nn.SiLU'; understood are"),
        ("modules.json", lambda modules: modules[:1], "has the modules Transformer; understood is"),
        ("modules.json", lambda modules: [*modules, modules[2]], "understood is"),
        ("modules.json", lambda modules: [modules[0] | {"type": "own.Code"}], "code that is not run"),
        ("modules.json", lambda modules: [modules[0], modules[1] | {"path": "../x"}], "leaves the folder"),
        ("modules.json", lambda modules: {}, "must hold a JSON list"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "there is no such prompt"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "must be a string"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be"),
        ("config.json", {"matryoshka_dimensions": [64]}, "matryoshka_dimensions must be"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(folder: Path, file: str, change: Any, sentence: str) -> None:
    before = changed(folder / file, change)
    try:
        with pytest.raises(ModelError, match=sentence):
            load_checkpoint(folder)
    finally:
        (folder / file).write_text(before)


def test_newer_files_name_the_mode_in_a_word(folder: Path) -> None:
    path = folder / "1_Pooling" / "config.json"
    before = changed(path, lambda value: {"embedding_dimension": 64, "pooling_mode": "lasttoken"})
    try:
        pooling = load_checkpoint(folder).pooling
        assert pooling is not None and pooling.states == "last"
    finally:
        path.write_text(before)


def test_prompts_are_left_out_where_there_are_none(folder: Path) -> None:
    """Then nothing is left out."""
    pooling = changed(folder / "1_Pooling" / "config.json", {"include_prompt": False})
    path = folder / "config_sentence_transformers.json"
    prompts = changed(path, {"prompts": {"query": ""}})
    try:
        assert load_checkpoint(folder).pooling is not None
    finally:
        (folder / "1_Pooling" / "config.json").write_text(pooling)
        path.write_text(prompts)


@pytest.mark.parametrize("kind", ["bert", "qwen3", "gemma3"])
def test_without_modules_nothing_says_how_states_are_pooled(kind: str, tmp_path: Path) -> None:
    embedder = make_embedder(kind, tmp_path)
    (tmp_path / "modules.json").unlink()
    if kind == "qwen3":
        changed(tmp_path / "config.json", {"architectures": ["Qwen3Model"]})
    with pytest.raises(ModelError, match=r"no modules\.json"):
        load_checkpoint(embedder.folder)


def test_an_encoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_embedder("bert", tmp_path)
    for change, sentence in (
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
    ):
        before = changed(tmp_path / "config.json", change)
        with pytest.raises(ModelError, match=sentence):
            load_checkpoint(tmp_path)
        (tmp_path / "config.json").write_text(before)


def test_a_reranker_has_one_label(tmp_path: Path) -> None:
    folder, model = make_reranker("bert", tmp_path, num_labels=3)
    with pytest.raises(ModelError, match="it scores 3 labels, and a reranker has one"):
        load_checkpoint(folder)
    one, model = make_reranker("bert", tmp_path / "one")
    pooling = load_checkpoint(one).pooling
    assert pooling is not None and pooling.facts.scores and pooling.states == "first"
    weight = pooling.steps[0].weight.to_float32()
    assert np.array_equal(weight, dict(model.named_parameters())["bert.pooler.dense.weight"].detach().numpy())


@pytest.mark.parametrize(
    ("change", "is_plain"),
    [
        ({}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.ReLU"}, None),
    ],
)
def test_a_reranker_says_how_its_scores_are_told(change: dict[str, Any], is_plain: bool | None, tmp_path: Path) -> None:
    folder, _ = make_reranker("bert", tmp_path)
    changed(folder / "config.json", change)
    if is_plain is None:
        with pytest.raises(ModelError, match=r"is 'torch\.nn\.ReLU'; understood are"):
            load_checkpoint(folder)
        return
    pooling = load_checkpoint(folder).pooling
    assert pooling is not None and pooling.facts.is_plain == is_plain
    raw = np.array([2.0], dtype="<f4").tobytes()
    assert score_of(pooling.facts, raw) == pytest.approx(2.0 if is_plain else 0.880797)
