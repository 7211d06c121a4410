"""BERT and XLM-RoBERTa from GGUF files, as llama.cpp's converter writes them: tokens and vectors are the folder's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.models.tiny_embedders import Embedder, make_embedder, make_reranker
from transformers import PreTrainedModel

from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.core.errors import ModelError
from twostroke.models.loading import load_checkpoint
from twostroke.text.gguf_tokenizer import read_gguf_tokenizer

TEXTS = ["the cat sat on a mat", "Prefill, and DECODE?", "what is café", "unknown ~ thing 42", "", "[SEP] a"]
MEAN, FIRST, RANK = 1, 2, 4


def write_bert(embedder: Embedder, path: Path, pooling: int, **left_out: bool) -> Path:
    vocabulary = json.loads((embedder.folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)

    def add_words(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list([marked(piece) for piece in pieces])
        writer.add_token_types([3 if piece.startswith("[") else 1 for piece in pieces])
        writer.add_unk_token_id(vocabulary["[UNK]"])
        writer.add_sep_token_id(vocabulary["[SEP]"])
        if not left_out.get("cls"):
            writer.add_bos_token_id(vocabulary["[CLS]"])

    return write_encoder(embedder.model, path, pooling, add_words, **left_out)


def write_xlm_roberta(model: PreTrainedModel, folder: Path, path: Path, pooling: int, **left_out: bool) -> Path:
    """The converter leaves out the positions of the padding."""
    rows = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]

    def add_words(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([token for token, _ in rows])
        writer.add_token_scores([score for _, score in rows])
        writer.add_token_types([3, 3, 3, 2, *[1] * (len(rows) - 4)])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        for name, token_id in (("bos", 0), ("eos", 2), ("unk", 3), ("sep", 2), ("pad", 1)):
            getattr(writer, f"add_{name}_token_id")(token_id)

    return write_encoder(model, path, pooling, add_words, positions_from=2, **left_out)


def write_encoder(
    model: PreTrainedModel,
    path: Path,
    pooling: int,
    add_words: Callable[[gguf.GGUFWriter], None],
    positions_from: int = 0,
    **left_out: bool,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - positions_from)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(bool(left_out.get("both ways")))
    writer.add_pooling_type(gguf.PoolingType(pooling))
    add_words(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for stored_name, tensor in model.state_dict().items():
        name = stored_name.removeprefix("roberta.")
        new_name = names.get_name(f"bert.{name}", try_suffixes=(".weight", ".bias")) or names.get_name(
            name, try_suffixes=(".weight", ".bias")
        )
        if new_name == "position_embd.weight":
            tensor = tensor[positions_from:]
        if new_name is not None and not name.startswith("pooler") and not left_out.get(new_name):
            writer.add_tensor(new_name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def marked(piece: str) -> str:
    """As such files have a piece."""
    if piece.startswith("[") and piece.endswith("]"):
        return piece
    return piece.removeprefix("##") if piece.startswith("##") else f"\u2581{piece}"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("kind", "pooling"), [("bert", FIRST), ("bert_mean", MEAN)])
def test_a_file_gives_the_vectors_of_its_folder(kind: str, pooling: int, backend: str, tmp_path: Path) -> None:
    embedder = make_embedder(kind, tmp_path / "folder")
    path = write_bert(embedder, tmp_path / "model.gguf", pooling)
    config = EngineConfig(backend=backend, quantise="none" if backend == "cpu" else None)
    with LLM(embedder.folder, config) as folder, LLM(path, config) as file:
        for text in TEXTS:
            ids = folder.tokenizer.encode(text)
            assert file.tokenizer.encode(text) == ids
            assert file.tokenizer.decode(ids) == folder.tokenizer.decode(ids)
        assert file.tokenizer.pair_frame == folder.tokenizer.pair_frame
        found = np.array(file.embed(TEXTS))
        expected = np.stack([embedder.vector(folder.tokenizer.encode(text)) for text in TEXTS])
        assert np.abs(found - expected).max() < (1e-4 if backend == "reference" else 1e-2)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_xlm_roberta_from_a_file(backend: str, tmp_path: Path) -> None:
    """Its files say "bert", too."""
    embedder = make_embedder("xlm_roberta", tmp_path / "folder")
    path = write_xlm_roberta(embedder.model, embedder.folder, tmp_path / "model.gguf", FIRST)
    config = EngineConfig(backend=backend, quantise="none" if backend == "cpu" else None)
    with LLM(embedder.folder, config) as folder, LLM(path, config) as file:
        for text in TEXTS:
            assert file.tokenizer.encode(text) == folder.tokenizer.encode(text)
        assert file.tokenizer.pair_frame == folder.tokenizer.pair_frame
        found = np.array(file.embed(TEXTS))
        expected = np.stack([embedder.vector(folder.tokenizer.encode(text)) for text in TEXTS])
        assert np.abs(found - expected).max() < (1e-4 if backend == "reference" else 1e-2)


def test_an_xlm_roberta_that_ranks(tmp_path: Path) -> None:
    folder, model = make_reranker("xlm_roberta", tmp_path / "folder")
    path = write_xlm_roberta(model, folder, tmp_path / "model.gguf", RANK)
    query, documents = "what is a cat", ["the cat sat on a mat", "prefill and decode", "a dog", "the two phases"]
    config = EngineConfig(backend="reference")
    with LLM(folder, config) as stored, LLM(path, config) as file:
        expected = stored.rerank(query, documents)
        assert np.ptp([one.score for one in expected]) > 0.01
        found = file.rerank(query, documents)
        assert [one.index for one in found] == [one.index for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-5)
    with pytest.raises(ModelError, match="cls is missing, or not a matrix of 64 inputs with a bias"):
        load_checkpoint(write_xlm_roberta(model, folder, tmp_path / "a.gguf", RANK, **{"cls.bias": True}))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    embedder = make_embedder("bert", tmp_path / "folder")
    with pytest.raises(ModelError, match=r"the tensor token_types\.weight is missing"):
        load_checkpoint(write_bert(embedder, tmp_path / "a.gguf", MEAN, **{"token_types.weight": True}))
    with pytest.raises(ModelError, match=r"bert\.attention\.causal is True, which is not supported"):
        load_checkpoint(write_bert(embedder, tmp_path / "b.gguf", MEAN, **{"both ways": True}))
    checkpoint = load_checkpoint(write_bert(embedder, tmp_path / "c.gguf", MEAN, cls=True))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.cls_token_id is missing, and an encoder's"):
        read_gguf_tokenizer(checkpoint.gguf_metadata or {})
