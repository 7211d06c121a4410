"""Grammars over a model's vocabulary, by llguidance: JSON schemas, regular expressions, Lark. Compiled once a spec and
copied for each answer. The library is imported when the first grammar comes: the core does without it."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from twostroke.core.errors import BadRequestError, install_hint
from twostroke.core.grammar import GrammarSpec, TokenMatcher
from twostroke.text import harmony
from twostroke.text.after_thought import AfterThought, ThoughtMasks, bits
from twostroke.text.grammar_matcher import GrammarMatcher, first_line
from twostroke.text.reasoning import markers_in
from twostroke.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 128 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 4096
MAX_LEXER_STATES = 50_000
"""States of 1 to 2 kB each that following one grammar may come to hold. The library limits its work a token."""
NUM_TRIED_TOKENS = 8
"""Tokens of an answer that are followed when a grammar is tried out."""
NUM_KEPT = 128
"""How many compiled grammars are kept: those used last."""

WHITESPACE = r"\n?[ ]{0,12}"
"""What may stand between the parts of a JSON text: room for the usual indentation, and an end to it. Without one, a
model that likes blanks would write nothing else."""


class Vocabulary:
    """What a grammar must know of a tokenizer."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`encode` is how the model was taught to cut a text; without it the longest tokens are taken."""
        self.tokens = tokens
        self.special_ids = special_ids
        self.eos_ids = eos_ids
        self._encode = encode
        special = frozenset(special_ids)
        self._id_of = {token: i for i, token in enumerate(tokens) if token and i not in special}
        self._longest = max(map(len, self._id_of), default=0)

    @staticmethod
    def of(tokenizer: Tokenizer) -> Vocabulary:
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        special_ids = sorted(tokenizer.special_tokens.values())
        eos_ids = sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < len(tokens))
        encode = partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
        return Vocabulary(tokens, special_ids, eos_ids, encode)

    def encode(self, text: str) -> list[int]:
        """Tokens whose bytes join to exactly this text: a SentencePiece model's own would put a space before it."""
        raw = text.encode()
        if self._encode is not None:
            token_ids = self._encode(text)
            if b"".join(self.tokens[token_id] for token_id in token_ids) == raw:
                return token_ids
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        token_ids: list[int] = []
        start = 0
        while start < len(raw):
            ends = range(min(len(raw), start + self._longest), start, -1)
            end = next((end for end in ends if raw[start:end] in self._id_of), None)
            if end is None:
                break  # a byte that no token can write: the matcher will say so
            token_ids.append(self._id_of[raw[start:end]])
            start = end
        return token_ids


class _TokenSource:
    """A vocabulary in the shape that llguidance reads. It encodes what a grammar leaves no choice about, so that the
    model sees it cut as it is used to."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._vocabulary.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class CompiledGrammar:
    """Whoever holds it keeps it from being compiled again."""

    __slots__ = ("__weakref__", "start")

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        """At the beginning of an answer; each has a copy."""


class GrammarCompiler:
    """May be called from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_ids:
            raise BadRequestError("this model has no end-of-text token, so no grammar can end its answers")
        try:
            import llguidance
        except ImportError:
            raise BadRequestError(f"grammars need llguidance; {install_hint('server')}") from None
        source: Any = _TokenSource(vocabulary)
        self._library = llguidance
        self._tokenizer: LLTokenizer = llguidance.LLTokenizer(source, eos_token=list(vocabulary.eos_ids))
        self._limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._end_mask = bits(vocabulary.eos_ids, len(vocabulary.tokens))
        self._vocabulary = vocabulary
        self._thoughts: ThoughtMasks | None = None
        self._compiled: WeakValueDictionary[GrammarSpec, CompiledGrammar] = WeakValueDictionary()
        """All that somebody holds, the latest used among them."""
        self._latest: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        """Never held while something is compiled: a step that needs a matcher does not wait for another's grammar."""

    def check(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._find(spec)

    def is_compiled(self, spec: GrammarSpec) -> bool:
        return spec.compiled in self._compiled

    def matcher(self, spec: GrammarSpec) -> TokenMatcher:
        compiled = self._find(spec)
        with self._lock:
            start, forget = compiled.start.deep_copy(), partial(self._forget, spec)
            found = GrammarMatcher(start, self._end_mask, len(self._vocabulary.tokens), forget)
            if spec.thought in ("none", "harmony"):
                return found
            if self._thoughts is None:
                tokens = self._vocabulary.tokens
                self._thoughts = ThoughtMasks(tokens, self._vocabulary.eos_ids, markers_in(frozenset(tokens)))
            return AfterThought(found, self._thoughts, is_open=spec.thought == "open")

    def _find(self, spec: GrammarSpec) -> CompiledGrammar:
        spec = spec.compiled
        found = self._compiled.get(spec) or self._compile(spec)
        with self._lock:
            found = self._compiled.setdefault(spec, found)
            self._latest[spec] = found
            self._latest.move_to_end(spec)
            while len(self._latest) > NUM_KEPT:
                self._latest.popitem(last=False)
        return found

    def _forget(self, spec: GrammarSpec) -> None:
        """Drop the compiled grammar: copies share its caches and limits, so once one copy is stuck, all are."""
        with self._lock:
            self._compiled.pop(spec.compiled, None)
            self._latest.pop(spec.compiled, None)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The library lets other threads run meanwhile."""
        check_size(spec)
        try:
            start = self._library.LLMatcher(self._tokenizer, self._whole(spec), log_level=0, limits=self._limits)
            start.compute_bitmask()  # some limits are only met here
        except Exception as error:  # whatever a stranger's grammar can bring about in the library
            raise BadRequestError(f"it cannot be followed: {first_line(str(error))}") from None
        if start.is_error():
            raise BadRequestError(f"it cannot be followed: {first_line(start.get_error())}")
        return CompiledGrammar(start)

    def try_out(self, spec: GrammarSpec) -> None:
        """Compile it, and write the first tokens of two answers: one always takes the first token that is allowed, the
        other the last, and none ends if it need not. Much is only found out when a grammar is followed."""
        start = self._find(spec).start
        end = int.from_bytes(self._end_mask, "little")
        for takes_first in (True, False):
            matcher = start.deep_copy()
            for _ in range(NUM_TRIED_TOKENS):
                if matcher.is_stopped():
                    break
                allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~end
                if matcher.is_error() or not allowed:
                    break
                lowest = allowed & -allowed
                matcher.consume_token((lowest if takes_first else allowed).bit_length() - 1)
            if matcher.is_error():
                raise BadRequestError(f"it cannot be followed: {first_line(matcher.get_error())}")

    def _whole(self, spec: GrammarSpec) -> str:
        """Of all that is watched."""
        source = self._source(spec)
        if spec.thought != "harmony":
            return source
        is_lark = spec.kind in ("lark", "choice")  # the library leaves Lark as it is, and wraps the others
        answer = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
        messages = {"name": "messages", "lark_grammar": harmony.HELD_ANSWER}
        return json.dumps({"grammars": [messages, {**answer, "name": "answer"}]})

    def _source(self, spec: GrammarSpec) -> str:
        matcher = self._library.LLMatcher
        if spec.kind == "regex":
            return matcher.grammar_from_regex(spec.text)
        if spec.kind == "lark":
            return matcher.grammar_from_lark(spec.text)
        if spec.kind == "choice":
            choices = json.loads(spec.text)
            return matcher.grammar_from_lark("start: " + " | ".join(lark_text(choice) for choice in choices))
        return matcher.grammar_from_json_schema(spec.text, overrides={"whitespace_pattern": WHITESPACE})


class LazyGrammars:
    """A tokenizer's grammars, compiled by nobody until one is asked for, or someone has the time to prepare."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def check(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._get().check(spec)

    def is_compiled(self, spec: GrammarSpec) -> bool:
        """Whether `check` and `matcher` would return at once."""
        return self._compiler is not None and self._compiler.is_compiled(spec)

    def matcher(self, spec: GrammarSpec) -> TokenMatcher:
        return self._get().matcher(spec)

    @property
    def is_prepared(self) -> bool:
        return self._compiler is not None

    def prepare(self) -> None:
        """What the first grammar would wait for, most of a second: the library, the vocabulary, a JSON object."""
        with suppress(BadRequestError):  # without the library, or an end-of-text token, none will be asked for
            self._get().check(GrammarSpec("json_schema", '{"type": "object"}'))
            self._tokenizer.encode("{", parse_special=False)

    def _get(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(Vocabulary.of(self._tokenizer))
            return self._compiler


def check_size(spec: GrammarSpec) -> None:
    """Refuse what is too long or too deep, before anything is compiled."""
    if len(spec.text) > MAX_GRAMMAR_CHARS:
        raise BadRequestError(f"it has {len(spec.text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    if spec.kind in ("json_schema", "choice"):
        try:
            value = json.loads(spec.text)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"it is not valid JSON: {error}") from None
        if _depth(value) > MAX_SCHEMA_DEPTH:
            raise BadRequestError(f"it is nested deeper than the {MAX_SCHEMA_DEPTH} levels that are allowed")
        if spec.kind == "choice":
            _check_choices(value)
        elif not isinstance(value, dict):
            raise BadRequestError("it must be a JSON object")


def _check_choices(value: object) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise BadRequestError("it must be a list of texts, at least one, and none empty")
    if len(value) > MAX_CHOICES:
        raise BadRequestError(f"it has {len(value)} choices; at most {MAX_CHOICES} are allowed")


def lark_text(text: str) -> str:
    """A literal text in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[object] = []
        for entry in level:
            if isinstance(entry, dict):
                inner.extend(entry.values())
            elif isinstance(entry, list):
                inner.extend(entry)
        level = inner
    return depth
