"""What a grammar lets a vocabulary write: both spellings of vocabularies, control tokens, ends, and the clock."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec
from twostroke.text import grammar, grammar_check
from twostroke.text.grammar import GrammarCompiler, LazyGrammars, Vocabulary
from twostroke.text.grammar_check import GrammarCheck
from twostroke.text.grammar_matcher import GrammarMatcher
from twostroke.text.tokenizer import Tokenizer

TEXT = GrammarSpec("json_schema", '{"type": "string"}')


def allows(matcher: GrammarMatcher, token_id: int) -> bool:
    mask = matcher.allowed()
    return token_id // 8 < len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


def takes(matcher: GrammarMatcher, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        if not allows(matcher, token_id):
            return False
        matcher.advance(token_id)
    return True


def test_control_tokens_are_no_text_and_the_end_comes_at_the_end(smollm2_tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(Vocabulary.of(smollm2_tokenizer)).matcher(TEXT)
    assert takes(matcher, smollm2_tokenizer.encode('"An open'))
    assert not any(allows(matcher, token_id) for token_id in smollm2_tokenizer.special_tokens.values())
    assert takes(matcher, smollm2_tokenizer.encode(' text"'))
    ends = smollm2_tokenizer.eos_token_ids
    assert [i for i in range(smollm2_tokenizer.vocab_size) if allows(matcher, i)] == sorted(ends)
    matcher.advance(min(ends))
    assert allows(matcher, min(ends))  # a step that was launched before the end was known


def test_a_sentencepiece_vocabulary(llama_style: tuple[object, Tokenizer]) -> None:
    tokenizer = llama_style[1]
    vocabulary = Vocabulary.of(tokenizer)
    for text in ("a word", " a word", "é\n{}", '{"name": "x"}'):
        assert b"".join(vocabulary.tokens[i] for i in vocabulary.encode(text)) == text.encode()
    matcher = GrammarCompiler(vocabulary).matcher(GrammarSpec("lark", 'start: "the answer is " /[0-9]/'))
    written = b""
    while not any(allows(matcher, token_id) for token_id in tokenizer.eos_token_ids):
        token_id = next(i for i in range(tokenizer.vocab_size) if allows(matcher, i))
        matcher.advance(token_id)
        written += tokenizer.token_bytes(token_id)
    assert written[:-1] == b"the answer is " and written[-1:].isdigit()


def test_what_the_first_grammar_waits_for_can_be_prepared(smollm2_tokenizer: Tokenizer) -> None:
    grammars = LazyGrammars(smollm2_tokenizer)
    times_s = [time.process_time()]
    for work in (grammars.prepare, lambda: grammars.check(TEXT)):
        work()
        times_s.append(time.process_time())
    assert grammars.is_prepared
    assert times_s[2] - times_s[1] < (times_s[1] - times_s[0]) / 4


def test_without_the_library_there_is_nothing_to_prepare(
    smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = LazyGrammars(smollm2_tokenizer)
    grammars.prepare()
    assert not grammars.is_prepared
    with pytest.raises(BadRequestError, match=r"\.\[server\]"):
        grammars.check(TEXT)


def test_a_grammar_that_takes_too_long_is_stopped_and_the_next_is_not(
    smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = GrammarCheck(smollm2_tokenizer)
    try:
        check.check(TEXT)
        monkeypatch.setattr(grammar_check, "COMPILE_LIMIT_S", 0.0)
        with pytest.raises(BadRequestError, match="took longer than 0 s"):
            check.check(GrammarSpec("lark", "start: " + " ".join(["x?"] * 20_000) + '\nx: "a"'))
        monkeypatch.undo()
        check.check(GrammarSpec("regex", "a+"))
        with pytest.raises(BadRequestError, match="unclosed group"):
            check.check(GrammarSpec("regex", "(a"))
    finally:
        check.close()


def test_a_grammar_that_somebody_holds_is_not_compiled_again(
    smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others come in between: a step would have to wait for it."""
    monkeypatch.setattr(grammar, "NUM_KEPT", 2)
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))
    held = compiler.check(TEXT)
    for number in range(1, 5):
        compiler.check(GrammarSpec("regex", f"a{{{number}}}"))
    assert compiler.is_compiled(TEXT) and compiler.is_compiled(GrammarSpec("regex", "a{4}"))
    assert not compiler.is_compiled(GrammarSpec("regex", "a{1}"))
    assert compiler.check(TEXT) is held
    del held
    for number in range(1, 4):
        compiler.check(GrammarSpec("regex", f"b{{{number}}}"))
    assert not compiler.is_compiled(TEXT)


def test_matchers_are_made_while_another_grammar_is_compiled(
    smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))
    compiler.check(TEXT)
    begun, go_on, compile_now = threading.Event(), threading.Event(), compiler._compile

    def slow(spec: GrammarSpec) -> grammar.CompiledGrammar:
        begun.set()
        assert go_on.wait(120)
        return compile_now(spec)

    monkeypatch.setattr(compiler, "_compile", slow)
    other = threading.Thread(target=compiler.check, args=(GrammarSpec("regex", "a+"),))
    other.start()
    try:
        assert begun.wait(120)
        assert takes(compiler.matcher(TEXT), smollm2_tokenizer.encode('"a'))
    finally:
        go_on.set()
        other.join()
