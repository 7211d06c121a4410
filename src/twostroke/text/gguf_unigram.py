"""XLM-RoBERTa's tokenizer from the metadata of a GGUF file: SentencePiece's unigram model, which takes the likeliest
pieces, behind a table of what is written otherwise. BGE-M3 and multilingual E5 have it, too."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twostroke.core.errors import ModelError
from twostroke.text.gguf_fields import TokenizerFields, TokenType
from twostroke.text.token_bytes import SPACE_MARK, Spelling
from twostroke.text.tokenizer import Tokenizer

_ADDED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)


def read_unigram(fields: TokenizerFields, types: list[int]) -> Tokenizer:
    first, last = fields.needed_id("cls", "bos"), fields.needed_id("seperator", "eos")
    space_first = fields.flag("tokenizer.ggml.add_space_prefix", True)
    scheme = "always" if space_first else "never"
    backend = Backend(
        models.Unigram(_vocabulary(fields, types), unk_id=fields.needed_id("unknown"), byte_fallback=False)
    )
    table = fields.byte_string("tokenizer.ggml.precompiled_charsmap")
    if table:
        backend.normalizer = normalizers.Precompiled(table)
    # Files differ in what they say of white space, and these models do not: none is kept but between words.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)]
    )
    backend.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    backend.add_tokens(
        [
            AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
            for token, kind in zip(fields.tokens, types, strict=True)
            if kind in _ADDED and token
        ]
    )
    return Tokenizer(
        backend,
        Spelling.SENTENCEPIECE,
        vocab_size=len(fields.tokens),
        bos_token_id=first,
        eos_token_id=last,
        eos_token_ids=frozenset({last}),
        prefix_ids=(first,),
        suffix_ids=(last,),
        leading_spaces_dropped=int(space_first),
        pair_frame=((first,), (last, last), (last,)),
    )


def _vocabulary(fields: TokenizerFields, types: list[int]) -> list[tuple[str, float]]:
    """What an unknown character costs follows from the least score: rows that only fill the matrix must not be it."""
    scores = fields.scores()
    plain = [score for score, kind in zip(scores, types, strict=True) if kind == TokenType.NORMAL]
    if not plain:
        raise ModelError("tokenizer.ggml.token_type has no piece of text in it")
    least = min(plain)
    return [
        (token, least if kind == TokenType.UNUSED else score)
        for token, score, kind in zip(fields.tokens, scores, types, strict=True)
    ]
