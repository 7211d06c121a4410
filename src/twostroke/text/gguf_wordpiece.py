"""BERT's tokenizer from the metadata of a GGUF file. There a piece that begins a word is marked, and one that goes on
is not: the other way round than BERT's own files have it."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twostroke.text.gguf_fields import TokenizerFields, TokenType
from twostroke.text.token_bytes import GOES_ON, SPACE_MARK, Spelling
from twostroke.text.tokenizer import Tokenizer

_LONGEST_WORD = 100
"""Characters; a longer one is unknown. As BERT's files have it."""


def read_wordpiece(fields: TokenizerFields, types: list[int]) -> Tokenizer:
    first, last, unknown = (fields.needed_id(*names) for names in (("cls", "bos"), ("seperator", "eos"), ("unknown",)))
    tokens = [_as_bert_has_it(token, kind) for token, kind in zip(fields.tokens, types, strict=True)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens) if token}
    backend = Backend(models.WordPiece(vocabulary, unk_token=tokens[unknown], max_input_chars_per_word=_LONGEST_WORD))
    lowers = fields.flag("tokenizer.ggml.normalizer.lowercase", True)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(GOES_ON)
    control = {first, last, unknown} | {at for at, kind in enumerate(types) if kind == TokenType.CONTROL}
    backend.add_tokens([AddedToken(tokens[at], special=True, normalized=False) for at in sorted(control) if tokens[at]])
    return Tokenizer(
        backend,
        Spelling.WORDPIECE,
        vocab_size=len(tokens),
        bos_token_id=first,
        eos_token_id=last,
        eos_token_ids=frozenset({last}),
        prefix_ids=(first,),
        suffix_ids=(last,),
        leading_spaces_dropped=1,
        pair_frame=((first,), (last,), (last,)),
    )


def _as_bert_has_it(token: str, kind: int) -> str:
    if token.startswith(SPACE_MARK):
        return token.removeprefix(SPACE_MARK)
    is_whole = kind == TokenType.CONTROL or (token.startswith("[") and token.endswith("]"))
    return token if is_whole or not token else GOES_ON + token
