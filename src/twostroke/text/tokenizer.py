"""Text to token ids and back, with the ids that a model treats specially. Built by `folder_tokenizer` and
`gguf_tokenizer`. The `tokenizers` library encodes; decoding is done here, so that a stream and a whole text agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from tokenizers import Tokenizer as Backend

from twostroke.core.errors import BadRequestError
from twostroke.text.fewest_tokens import FewestTokens
from twostroke.text.guarded_tokens import GuardedTokens
from twostroke.text.token_bytes import Spelling, piece_bytes

PairFrame = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Tokenizer:
    def __init__(
        self,
        backend: Backend,
        spelling: Spelling,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_id: int | None,
        eos_token_ids: frozenset[int],
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        leading_spaces_dropped: int = 0,
        chat_template: str | None = None,
        infill_ids: tuple[int, int, int] | None = None,
        pair_frame: PairFrame | None = None,
    ) -> None:
        self._backend = backend
        self._spelling = spelling
        added = backend.get_added_tokens_decoder()
        self._added_texts: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.eos_token_ids = eos_token_ids
        """Every id that ends an answer: end of text, end of turn."""
        self.prefix_ids = prefix_ids
        """What `encode(add_special_tokens=True)` puts before the text, often BOS."""
        self.suffix_ids = suffix_ids
        self.leading_spaces_dropped = leading_spaces_dropped
        """SentencePiece puts a space before the text it encodes; decoding takes as many away."""
        self.chat_template = chat_template
        self.infill_ids = infill_ids
        """Fill-in-the-middle tokens (prefix, suffix, middle), where the file says which they are."""
        self.pair_frame: PairFrame = pair_frame or (prefix_ids, (), suffix_ids)
        """What stands before, between and behind two texts that are read together."""

    @property
    def add_bos(self) -> bool:
        return self.bos_token_id is not None and self.bos_token_id in self.prefix_ids

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._backend.id_to_token(self.eos_token_id)

    @property
    def unknown_token(self) -> str | None:
        token = getattr(self._backend.model, "unk_token", None)
        return token if isinstance(token, str) else None

    @cached_property
    def added_tokens(self) -> dict[int, dict[str, str | bool]]:
        """Texts that are always one token, by id, as a `tokenizer_config.json` has them."""
        return {
            token_id: {
                "content": token.content,
                "lstrip": token.lstrip,
                "normalized": token.normalized,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
                "special": token.special,
            }
            for token_id, token in self._backend.get_added_tokens_decoder().items()
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """With `parse_special=False`, `<|im_start|>` and its like in the text are plain characters: the guard against
        users who write control tokens. A rendered chat template already holds its BOS, so pass
        `add_special_tokens=False` with one."""
        utf8_of(text)
        ids: Sequence[int] = self.backend_of(is_guarded=not parse_special).encode(text, add_special_tokens=False).ids
        if not parse_special:
            ids = self.guarded.translate(ids)
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else list(ids)

    def encode_unlocked(
        self, text: str, *, is_guarded: bool = False, max_tokens: int | None = None
    ) -> tuple[int, Sequence[int]]:
        """How many tokens a text is, unframed, and their ids, which are left out where they are more than `max_tokens`.
        Other threads run meanwhile: the library keeps Python's lock for a single text, and lets it go for a batch."""
        utf8_of(text)
        encoding = self.backend_of(is_guarded=is_guarded).encode_batch_fast([text], add_special_tokens=False)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            return len(encoding), []
        return len(encoding), self.guarded.translate(encoding.ids) if is_guarded else encoding.ids

    def backend_of(self, *, is_guarded: bool) -> Backend:
        return self.guarded.backend if is_guarded else self._backend

    @cached_property
    def guarded(self) -> GuardedTokens:
        """Takes part of a second to make: a server does that before it takes requests."""
        return GuardedTokens(self.serialised, self.special_tokens)

    @cached_property
    def serialised(self) -> str:
        """As `tokenizer.json` has it."""
        return self._backend.to_str()

    @cached_property
    def fewest(self) -> FewestTokens:
        return FewestTokens(self._backend, len(self.prefix_ids) + len(self.suffix_ids), self.token_bytes)

    def specials_in(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._special_ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary (a padded embedding has such) nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped)
        text = raw.decode("utf-8", "replace")
        for _ in range(self.leading_spaces_dropped):
            text = text.removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read_bytes(token_id)
        return found

    def _read_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else piece_bytes(piece, self._spelling)

    def token_text(self, token_id: int) -> str:
        """One token on its own, for showing; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def id_of(self, text: str) -> int | None:
        """The token that is spelled so in the vocabulary."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id


def utf8_of(text: str) -> bytes:
    if not isinstance(text, str):
        raise BadRequestError(f"the text to encode must be a string, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"the text holds half of a surrogate pair at character {error.start}") from None
