"""Tiny random models that give vectors, saved as `sentence-transformers` saves them: weights and config by
transformers, a tokenizer by `tokenizers`, and the small files that say how states are pooled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel

Array = npt.NDArray[np.float32]

MAX_TOKENS = 64
WORDS = (
    *("the", "a", "two", "phases", "of", "request", "are", "prefill", "and", "decode"),
    *("cat", "dog", "sat", "on", "mat", "what", "is", "reads", "writes", "tokens"),
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!:"
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Embedder:
    """A folder, and what transformers computes of the same weights."""

    folder: Path
    model: PreTrainedModel
    states: str
    """Several are joined by a plus."""
    dense: tuple[torch.nn.Linear, ...] = ()
    normalises: bool = True

    def vector(self, ids: list[int]) -> Array:
        with torch.no_grad():
            hidden = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            pooled = torch.cat([pooled_as(kind, hidden) for kind in self.states.split("+")])
            for layer in self.dense:
                pooled = layer(pooled)
            if self.normalises:
                pooled = torch.nn.functional.normalize(pooled, dim=0)
        return pooled.numpy()


def pooled_as(kind: str, hidden: torch.Tensor) -> torch.Tensor:
    """As `sentence-transformers` defines them."""
    weights = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype)
    return {
        "first": hidden[0],
        "last": hidden[-1],
        "max": hidden.max(0).values,
        "mean": hidden.sum(0) / len(hidden),
        "root_mean": hidden.sum(0) / len(hidden) ** 0.5,
        "weighted_mean": (hidden * weights[:, None]).sum(0) / weights.sum(),
    }[kind]


MODES = {
    "first": "cls",
    "max": "max",
    "mean": "mean",
    "root_mean": "mean_sqrt_len_tokens",
    "weighted_mean": "weightedmean",
    "last": "lasttoken",
}
"""Their names in files, in the order in which older files join several."""
_OLDER = {"first": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weighted_mean": "weightedmean_tokens"}


def pooled_by(embedder: Embedder, *kinds: str, is_older: bool) -> Embedder:
    """The same model with other states, as newer files say it or as older ones do."""
    if is_older:
        said: dict[str, Any] = {f"pooling_mode_{_OLDER.get(kind, mode)}": kind in kinds for kind, mode in MODES.items()}
        kinds = tuple(kind for kind in MODES if kind in kinds)
    else:
        said = {"pooling_mode": MODES[kinds[0]] if len(kinds) == 1 else [MODES[kind] for kind in kinds]}
    _write(embedder.folder / "1_Pooling" / "config.json", {"embedding_dimension": 64, **said})
    return replace(embedder, states="+".join(kinds))


def make_embedder(
    kind: str,
    folder: Path,
    *,
    prompts: dict[str, str] | None = None,
    max_tokens: int = MAX_TOKENS,
    sizes: dict[str, Any] | None = None,
) -> Embedder:
    """`kind`: one of `_KINDS`. `sizes`: of BERT, other ones than the tiny model's."""
    torch.manual_seed(sum(map(ord, kind)))
    make, states, num_dense = _KINDS[kind]
    model = (_bert(max_tokens, sizes) if sizes else make(max_tokens)).eval()
    model.set_attn_implementation("eager")
    _randomise(model, norm_centre=0.0 if kind == "gemma3" else 1.0)
    model.save_pretrained(folder)
    if kind.startswith("qwen3"):
        _change(folder / "config.json", architectures=["Qwen3ForCausalLM"])  # as it is published
    _tokenizer(kind).save(str(folder / "tokenizer.json"))
    dense = _sentence_files(folder, model.config.hidden_size, states, num_dense, prompts or {}, max_tokens)
    return Embedder(folder, model, states, dense)


def make_reranker(kind: str, folder: Path, num_labels: int = 1) -> tuple[Path, PreTrainedModel]:
    """`kind`: bert, roberta or xlm_roberta."""
    torch.manual_seed(7)
    if kind == "bert":
        config = transformers.BertConfig(**_SIZES, num_labels=num_labels)
        model: PreTrainedModel = transformers.BertForSequenceClassification(config)
    else:
        stem = {"roberta": "Roberta", "xlm_roberta": "XLMRoberta"}[kind]
        make_config = getattr(transformers, f"{stem}Config")
        config = make_config(**{**_SIZES, "max_position_embeddings": MAX_TOKENS + 2}, num_labels=1)
        config.type_vocab_size = 1
        model = getattr(transformers, f"{stem}ForSequenceClassification")(config)
    model = model.eval()
    model.set_attn_implementation("eager")
    _randomise(model, norm_centre=1.0)
    model.save_pretrained(folder)
    _tokenizer(kind).save(str(folder / "tokenizer.json"))
    return folder, model


def make_answering_reranker(folder: Path, *, is_classifier: bool = False) -> PreTrainedModel:
    """As Qwen3-Reranker is published, or as it is converted for those who read classifiers."""
    torch.manual_seed(9)
    sizes = {**_DECODER, "max_position_embeddings": 2048, "vocab_size": 320}
    if is_classifier:
        model: PreTrainedModel = transformers.Qwen3ForSequenceClassification(
            transformers.Qwen3Config(**sizes, num_labels=1)
        )
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, "tie_word_embeddings": False}))
    model = model.eval()
    _randomise(model, norm_centre=1.0)
    model.save_pretrained(folder)
    _answering_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def _answering_tokenizer() -> Tokenizer:
    """Bytes, and the words that are said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, "ye", "yes", "no"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _randomise(model: PreTrainedModel, norm_centre: float) -> None:
    """Every weight matters, and other texts have other vectors."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(norm_centre + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def _qwen3(max_tokens: int, **own: Any) -> PreTrainedModel:
    sizes = {**_DECODER, "max_position_embeddings": max_tokens}
    return transformers.Qwen3Model(transformers.Qwen3Config(**sizes, **own))


def _qwen3_both_ways(max_tokens: int) -> PreTrainedModel:
    """As embedders are that were made of decoders. Two of three layers have a window."""
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return _qwen3(max_tokens, is_causal=False, **windows)


def _gemma3(max_tokens: int) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {"layer_types": kinds, "sliding_window": 9, "query_pre_attn_scalar": 20, "use_bidirectional_attention": True}
    sizes = {**_DECODER, "max_position_embeddings": max_tokens}
    return transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**sizes, **own))


def _bert(max_tokens: int, sizes: dict[str, Any] | None = None) -> PreTrainedModel:
    own = {**_SIZES, **(sizes or {}), "max_position_embeddings": max_tokens}
    return transformers.BertModel(transformers.BertConfig(**own))


def _qwen2_both_ways(max_tokens: int) -> PreTrainedModel:
    """As gte-Qwen2-instruct."""
    own = {name: value for name, value in _DECODER.items() if name != "head_dim"}
    own |= {"max_position_embeddings": max_tokens, "is_causal": False}
    return transformers.Qwen2Model(transformers.Qwen2Config(**own))


def _mistral(max_tokens: int) -> PreTrainedModel:
    """As e5-mistral and SFR-Embedding. Two layers: without norms on queries and keys each one magnifies what 16 bits
    leave out of KV."""
    own = {**_DECODER, "max_position_embeddings": max_tokens, "sliding_window": 9, "num_hidden_layers": 2}
    return transformers.MistralModel(transformers.MistralConfig(**own))


def _llama(max_tokens: int) -> PreTrainedModel:
    return transformers.LlamaModel(transformers.LlamaConfig(**{**_DECODER, "max_position_embeddings": max_tokens}))


def _roberta(max_tokens: int) -> PreTrainedModel:
    sizes = {**_SIZES, "max_position_embeddings": max_tokens + 2}
    return transformers.RobertaModel(transformers.RobertaConfig(**sizes, type_vocab_size=1, pad_token_id=1))


def _xlm_roberta(max_tokens: int) -> PreTrainedModel:
    sizes = {**_SIZES, "max_position_embeddings": max_tokens + 2}
    return transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**sizes, type_vocab_size=1, pad_token_id=1))


_KINDS: dict[str, tuple[Callable[[int], PreTrainedModel], str, int]] = {
    "qwen3": (_qwen3, "last", 0),
    "qwen3_both_ways": (_qwen3_both_ways, "mean", 0),
    "qwen2_both_ways": (_qwen2_both_ways, "last", 0),
    "mistral": (_mistral, "last", 0),
    "llama": (_llama, "mean", 0),
    "gemma3": (_gemma3, "mean", 2),
    "bert": (_bert, "first", 0),
    "bert_mean": (_bert, "mean", 0),
    "roberta": (_roberta, "first", 0),
    "xlm_roberta": (_xlm_roberta, "first", 0),
}
"""What makes the model, how its states are pooled, and how many matrices the vector goes through."""


def _tokenizer(kind: str) -> Tokenizer:
    """WordPiece as BERT's, Unigram as XLM-RoBERTa's, byte-level pieces as Qwen's: one token behind a text, or one on
    each side."""
    if kind.startswith("bert"):
        return _wordpiece()
    if kind == "roberta":
        return _byte_level_between()
    return _unigram() if kind in ("xlm_roberta", "gemma3") else byte_level_tokenizer()


def _wordpiece() -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *_LETTERS[1:], *(f"##{letter}" for letter in _LETTERS)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(16)  # published files have such settings of their own, which must not count
    tokenizer.enable_padding(length=16)
    return tokenizer


def _unigram() -> Tokenizer:
    pieces = [*(f"\u2581{word}" for word in WORDS), "\u2581", *_LETTERS]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -1.0) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=3))
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:250])}
    vocab["<|endoftext|>"] = 251
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 251)]
    )
    return tokenizer


def _byte_level_between() -> Tokenizer:
    """RoBERTa's bytes, of which words are joined, between the signs of XLM-RoBERTa."""
    signs, space = ["<s>", "<pad>", "</s>", "<unk>"], "\u0120"
    words = [f"{space}{word}" for word in WORDS]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    pieces = dict.fromkeys([*signs, space, *_LETTERS, *("".join(merge) for merge in merges)])
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    tokenizer.add_special_tokens(signs)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def _sentence_files(
    folder: Path, width: int, states: str, num_dense: int, prompts: dict[str, str], max_tokens: int
) -> tuple[torch.nn.Linear, ...]:
    modes = {"first": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    pooling: dict[str, Any] = {
        f"pooling_mode_{mode}": mode == modes[states] for mode in (*modes.values(), "max_tokens")
    }
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **pooling, "include_prompt": True})
    kinds = ["Transformer", "Pooling", *["Dense"] * num_dense, "Normalize"]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    dense = []
    for index in range(num_dense):
        path, inputs, outputs = folder / f"{index + 2}_Dense", (64, 96)[index], (96, 32)[index]
        layer = torch.nn.Linear(inputs, outputs, bias=False)
        path.mkdir(parents=True)
        save_file({"linear.weight": layer.weight.detach().clone()}, path / "model.safetensors")
        identity = "torch.nn.modules.linear.Identity"
        settings = {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}
        _write(path / "config.json", settings)
        dense.append(layer)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens - 4, "do_lower_case": False})
    return tuple(dense)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _change(path: Path, **changes: Any) -> None:
    _write(path, json.loads(path.read_text()) | changes)
