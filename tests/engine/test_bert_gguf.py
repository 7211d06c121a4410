"""BERT from GGUF files, as llama.cpp's converter writes them: tokens and vectors are those of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.models.tiny_embedders import Embedder, make_embedder

from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.core.errors import ModelError
from twostroke.models.loading import load_checkpoint
from twostroke.text.gguf_tokenizer import read_gguf_tokenizer

TEXTS = ["the cat sat on a mat", "Prefill, and DECODE?", "what is café", "unknown ~ thing 42", "", "[SEP] a"]
MEAN, FIRST = 1, 2


def write_bert(embedder: Embedder, path: Path, pooling: int, **left_out: bool) -> Path:
    config = embedder.model.config
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(bool(left_out.get("both ways")))
    writer.add_pooling_type(gguf.PoolingType(pooling))
    vocabulary = json.loads((embedder.folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([marked(piece) for piece in pieces])
    writer.add_token_types([3 if piece.startswith("[") else 1 for piece in pieces])
    writer.add_unk_token_id(vocabulary["[UNK]"])
    writer.add_sep_token_id(vocabulary["[SEP]"])
    if not left_out.get("cls"):
        writer.add_bos_token_id(vocabulary["[CLS]"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, tensor in embedder.model.state_dict().items():
        new_name = names.get_name(f"bert.{name}", try_suffixes=(".weight", ".bias")) or names.get_name(
            name, try_suffixes=(".weight", ".bias")
        )
        if new_name is not None and not name.startswith("pooler") and not left_out.get(new_name):
            writer.add_tensor(new_name, tensor.numpy())
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


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    embedder = make_embedder("bert", tmp_path / "folder")
    with pytest.raises(ModelError, match=r"the tensor token_types\.weight is missing"):
        load_checkpoint(write_bert(embedder, tmp_path / "a.gguf", MEAN, **{"token_types.weight": True}))
    with pytest.raises(ModelError, match=r"bert\.attention\.causal is True, which is not supported"):
        load_checkpoint(write_bert(embedder, tmp_path / "b.gguf", MEAN, **{"both ways": True}))
    checkpoint = load_checkpoint(write_bert(embedder, tmp_path / "c.gguf", MEAN, cls=True))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.cls_token_id is missing, and BERT's tokenizer needs it"):
        read_gguf_tokenizer(checkpoint.gguf_metadata or {})
