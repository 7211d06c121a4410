"""A Tokenizer from the metadata of a GGUF file: "gpt2" is byte-level BPE, "llama" is SentencePiece BPE with scores,
"gemma4" the same with merges, "bert" is WordPiece.
A model or a pre-tokenizer that is not known is refused, because guessing would give wrong tokens without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend

from twostroke.core.errors import ModelError
from twostroke.text import harmony
from twostroke.text.backend_errors import backend_errors_as
from twostroke.text.gguf_fields import TokenizerFields, TokenType
from twostroke.text.gguf_unigram import read_unigram
from twostroke.text.gguf_wordpiece import read_wordpiece
from twostroke.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from twostroke.text.token_bytes import SPACE_MARK, Spelling, byte_token_value
from twostroke.text.tokenizer import Tokenizer

END_OF_TURN_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"}
    | {"<turn|>", "<|tool_response>"}  # Gemma 4's: behind its calls it begins a response, which is another's to give
)
"""GGUF has no list of the tokens that end an answer, as generation_config.json has; these do wherever they are."""
_ADDED_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED})


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    is_encoder = metadata.get("general.architecture") == "bert"
    if model not in ("gpt2", "llama", "gemma4", "bert") and not (model == "t5" and is_encoder):
        known = "gpt2 (byte-level BPE), llama and gemma4 (SentencePiece BPE), bert (WordPiece), encoders' t5 (unigram)"
        raise ModelError(f"tokenizer.ggml.model is {model!r:.60}, which is not known here; the known ones are: {known}")
    fields = TokenizerFields(metadata)
    _require_distinct(fields.tokens)
    types = _token_types(fields, metadata)
    with backend_errors_as("the tokenizer fields of the file do not make a tokenizer"):
        if model == "bert":
            return read_wordpiece(fields, types)
        if model == "t5":
            return read_unigram(fields, types)
        return _byte_level(fields, types) if model == "gpt2" else _sentencepiece(fields, types, metadata)


def _byte_level(fields: TokenizerFields, types: list[int]) -> Tokenizer:
    pre = _pre_tokenizer(fields)
    # An entry without text is left out: nothing encodes to it, and it decodes to nothing.
    vocabulary = {token: token_id for token_id, token in enumerate(fields.tokens) if token}
    model = models.BPE(vocab=vocabulary, merges=fields.merges(), ignore_merges=pre.whole_words_first)
    backend = Backend(model)
    backend.pre_tokenizer = pre.build()
    if normaliser := pre.build_normaliser():
        backend.normalizer = normaliser
    _add_tokens(backend, fields.tokens, types)
    return _finish(backend, Spelling.BYTE_LEVEL, fields, types, adds_bos=pre.adds_bos)


def _pre_tokenizer(fields: TokenizerFields) -> PreTokenizer:
    key = "tokenizer.ggml.pre"
    name, known = fields.text(key), ", ".join(PRE_TOKENIZERS)
    if name is None:
        raise ModelError(
            f"the file has no {key}, so how it cuts text before BPE is not known: convert the model again with a "
            f"converter that writes it (known here: {known})"
        )
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"{key} is {name[:60]!r}, which is not known here; the known ones are: {known}")
    return PRE_TOKENIZERS[name]


def _sentencepiece(fields: TokenizerFields, types: list[int], metadata: Mapping[str, Any]) -> Tokenizer:
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if metadata.get(key):
            raise ModelError(f"{key} asks for a normalisation of the text that is not supported here")
    is_gemma4 = metadata.get("tokenizer.ggml.model") == "gemma4"
    # A user-defined piece is matched in the text as it was written, so its spaces must be spaces.
    tokens = [
        token.replace(SPACE_MARK, " ") if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(fields.tokens, types, strict=True)
    ]
    _require_distinct(tokens)
    unknown_id = fields.token_id("tokenizer.ggml.unknown_token_id", default=0)
    has_bytes = {byte_token_value(token) for token, kind in zip(tokens, types, strict=True) if kind == TokenType.BYTE}
    if unknown_id is None and not has_bytes.issuperset(range(256)):
        raise ModelError("the vocabulary has neither an unknown token nor a token for each byte")
    backend = Backend(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens) if token},
            merges=fields.merges() if is_gemma4 else merges_from_scores(tokens, types, fields.scores()),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=bool(has_bytes),
        )
    )
    space_first = fields.flag("tokenizer.ggml.add_space_prefix", default=not is_gemma4)
    spaces = [normalizers.Prepend(SPACE_MARK)] if space_first else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE_MARK)])
    # Phi-3 swallows the white space behind its turn marks; the file does not say so.
    is_phi3 = metadata.get("general.architecture") == "phi3"
    _add_tokens(backend, tokens, types, strips_right=is_phi3)
    return _finish(
        backend, Spelling.SENTENCEPIECE, fields, types, adds_bos=True, leading_spaces_dropped=int(space_first)
    )


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece scores best, and has no list of merges: so every way to
    make a piece of two others is one, best score first. Of the ways to make one piece the longer left part goes first,
    which in a run of one character is the leftmost, as SentencePiece breaks its ties."""
    usable = [token_id for token_id, token in enumerate(tokens) if types[token_id] == TokenType.NORMAL and token]
    known = {tokens[token_id] for token_id in usable}
    usable.sort(key=lambda token_id: -scores[token_id])  # stable: of equal scores the lower id first
    merges: list[tuple[str, str]] = []
    for token_id in usable:
        token = tokens[token_id]
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in known and (right := token[cut:]) in known:
                merges.append((left, right))
    return merges


def _token_types(fields: TokenizerFields, metadata: Mapping[str, Any]) -> list[int]:
    """As the file gives them, except that a token known to end turns is never plain text."""
    types = fields.token_types()
    if metadata.get("tokenizer.ggml.token_type") is None:
        for key in ("bos", "eos", "unknown", "padding"):
            token_id = fields.token_id(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                types[token_id] = TokenType.CONTROL
        for token_id, token in enumerate(fields.tokens):
            if byte_token_value(token) is not None and metadata["tokenizer.ggml.model"] != "gpt2":
                types[token_id] = TokenType.BYTE
    for token_id in _end_of_turn_ids(fields):
        types[token_id] = TokenType.CONTROL
    return types


def _end_of_turn_ids(fields: TokenizerFields) -> set[int]:
    ends = END_OF_TURN_TEXTS
    if set(harmony.SIGNS) <= set(fields.tokens):  # there `<|end|>` ends a message, and others may follow
        ends = (ends - {harmony.END}) | {harmony.RETURN, harmony.CALL}
    return {fields.tokens.index(text) for text in ends.intersection(fields.tokens)}


def _add_tokens(backend: Backend, tokens: list[str], types: list[int], *, strips_right: bool = False) -> None:
    keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
    added = [
        AddedToken(
            token,
            special=kind != TokenType.USER_DEFINED,
            normalized=False,
            rstrip=strips_right and kind == TokenType.CONTROL and token not in keeps_space,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in _ADDED_TYPES and token
    ]
    backend.add_tokens(added)


def _finish(
    backend: Backend,
    spelling: Spelling,
    fields: TokenizerFields,
    types: list[int],
    *,
    adds_bos: bool,
    leading_spaces_dropped: int = 0,
) -> Tokenizer:
    is_sentencepiece = spelling is Spelling.SENTENCEPIECE
    bos = fields.token_id("tokenizer.ggml.bos_token_id", default=1 if is_sentencepiece else None)
    eos = fields.token_id("tokenizer.ggml.eos_token_id", default=2 if is_sentencepiece else None)
    endings = {eos, *(fields.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))}
    endings |= _end_of_turn_ids(fields)
    with_bos = fields.flag("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None
    with_eos = fields.flag("tokenizer.ggml.add_eos_token", False) and eos is not None
    return Tokenizer(
        backend,
        spelling,
        vocab_size=len(fields.tokens),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=frozenset(token_id for token_id in endings if token_id is not None),
        prefix_ids=(bos,) if with_bos and bos is not None else (),
        suffix_ids=(eos,) if with_eos and eos is not None else (),
        leading_spaces_dropped=leading_spaces_dropped,
        chat_template=fields.text("tokenizer.chat_template"),
        infill_ids=_infill_ids(fields),
    )


def _infill_ids(fields: TokenizerFields) -> tuple[int, int, int] | None:
    """Newer files have the first names, older ones the second."""
    found = []
    for name, older in (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle")):
        token_id = fields.token_id(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            token_id = fields.token_id(f"tokenizer.ggml.{older}_token_id")
        found.append(token_id)
    prefix_id, suffix_id, middle_id = found
    if prefix_id is None or suffix_id is None or middle_id is None:
        return None
    return prefix_id, suffix_id, middle_id


def _require_distinct(tokens: list[str]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    seen: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token and token in seen:
            raise ModelError(f"tokenizer.ggml.tokens holds {token[:60]!r} twice, as {seen[token]} and {token_id}")
        seen[token] = token_id
