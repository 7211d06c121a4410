"""Folders as Hugging Face lays them out, against transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from twostroke.core.errors import ModelError
from twostroke.text.detokenizer import IncrementalDetokenizer
from twostroke.text.folder_tokenizer import read_folder_tokenizer
from twostroke.text.loading import load_tokenizer

from .conftest import gguf_fields_of, train_sentencepiece
from .sample_strings import SAMPLES, random_strings


def byte_level_backend() -> Backend:
    """Llama 3's layout: a BOS from the post-processor, special tokens behind the vocabulary of the model."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(SAMPLES, trainer)
    backend.add_special_tokens(["<|bos|>", "<|eot|>", "<|end|>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return backend


def sentencepiece_backend() -> Backend:
    """Llama 2's layout, as converters write it."""
    from twostroke.text.gguf_tokenizer import merges_from_scores

    fields = gguf_fields_of(train_sentencepiece(space_prefix=True), space_prefix=True)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = merges_from_scores(tokens, types, fields["tokenizer.ggml.scores"])
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def write_folder(folder: Path, backend: Backend, **files: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_equals_transformers_on_the_same_folder(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = byte_level_backend() if kind == "byte level" else sentencepiece_backend()
    folder = write_folder(tmp_path, backend, tokenizer_config={"clean_up_tokenization_spaces": False})
    ours, reference = read_folder_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    for text in SAMPLES + random_strings(300, seed=23):
        for add_special_tokens in (True, False):
            ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert ids == reference.encode(text, add_special_tokens=add_special_tokens), repr(text)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)
        detokenizer = IncrementalDetokenizer(ours)
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == ours.decode(ids)


def test_byte_level_decoding_of_any_bytes_equals_the_library(tmp_path: Path) -> None:
    import random

    backend = byte_level_backend()
    ours, rng = read_folder_tokenizer(write_folder(tmp_path, backend)), random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(12))]
        assert ours.decode(ids) == backend.decode(ids)


def test_special_tokens_and_endings_come_from_the_small_files(tmp_path: Path) -> None:
    backend = byte_level_backend()
    eot, end = backend.token_to_id("<|eot|>"), backend.token_to_id("<|end|>")
    folder = write_folder(
        tmp_path,
        backend,
        tokenizer_config={"bos_token": "<|bos|>", "chat_template": "{{ messages[0].content }}"},
        special_tokens_map={"eos_token": {"content": "<|eot|>"}},
        generation_config={"eos_token_id": [eot, end]},
        config={"eos_token_id": eot},
    )
    tokenizer = load_tokenizer(folder, None)
    assert tokenizer.eos_token_ids == {eot, end}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eot|>")
    assert tokenizer.add_bos and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    assert tokenizer.is_special(eot) and not tokenizer.is_special(backend.token_to_id("<think>"))
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert eot not in tokenizer.encode("<|eot|>", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("<|eot|>", parse_special=False)) == "<|eot|>"


def test_where_the_chat_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": named})
    assert read_folder_tokenizer(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert read_folder_tokenizer(folder).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert read_folder_tokenizer(folder).chat_template is None


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = read_folder_tokenizer(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("one two three four five six")) == "one two three four five six"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"looked for tokenizer\.json"):
        read_folder_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"{" * 100_000, b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_folder_tokenizer(tmp_path)


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelError, match=r"CTC.*ByteLevel"):
        read_folder_tokenizer(write_folder(tmp_path, backend))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", "{", "not JSON"),
        ("tokenizer_config", "[]", "JSON object"),
        ("tokenizer_config", '{"chat_template": 3}', "chat_template"),
        ("generation_config", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config", '{"eos_token_id": [-1]}', "eos_token_id"),
        ("config", '{"bos_token_id": true}', "bos_token_id"),
        ("config", "[" * 200_000, "not JSON"),
    ],
)
def test_broken_small_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = write_folder(tmp_path, byte_level_backend())
    (folder / f"{name}.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        read_folder_tokenizer(folder)


def test_a_wordpiece_vocabulary_is_read(tmp_path: Path) -> None:
    """BERT's: pieces that go on have no space before them, and settings for batches do not count."""
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = read_folder_tokenizer(write_folder(tmp_path, backend))
    assert tokenizer.encode("The cats sat") == [1, 3, 4, 5, 6, 2]
    assert tokenizer.decode([1, 3, 4, 5, 6, 2]) == "the cats sat"
    assert tokenizer.pair_frame == ((1,), (2,), (2,))
    assert tokenizer.fewest.of("the" + " " * 5000 + "cat", is_framed=True) <= 4
