"""Answers of the real model held to grammars: each is what was asked for, and nobody else's changes by it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from tests.engine.conftest import BYTES_PER_MB

from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.engine.build import assemble
from twostroke.text import grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
PROMPT = "A person, as JSON: "
FREE = ["The capital of France is", "Once upon a time, there was"]


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 2.0, "top_p": 0.9}])
def test_every_answer_follows_its_schema(smollm2_llm: LLM, sampling: dict[str, float]) -> None:
    num_samples = 1 if sampling["temperature"] == 0 else 6
    params = SamplingParams(max_tokens=120, grammar=JSON, n=num_samples, seed=3, **sampling)
    for sample in smollm2_llm.generate(PROMPT, params)[0].samples:
        assert sample.finish_reason == "stop"
        check(sample.text)


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[A-F]{3}-\d{4}", r"[A-F]{3}-\d{4}"),
        ("choice", '["yes", "no \\"maybe\\"", "né/\\\\"]', r'yes|no "maybe"|né/\\'),
        ("lark", 'start: "(" start ")" | /[0-9]+/', r"\(*\d+\)*"),
    ],
)
def test_other_kinds(smollm2_llm: LLM, kind: str, text: str, pattern: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, n=4, grammar=GrammarSpec(kind, text))
    for sample in smollm2_llm.generate("Answer:", params)[0].samples:
        assert re.fullmatch(pattern, sample.text) or (sample.finish_reason == "length" and kind == "lark")


def test_free_neighbours_write_what_they_write_alone(smollm2_llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=16)
    alone = [smollm2_llm.generate(prompt, free)[0].token_ids for prompt in FREE]
    held = SamplingParams(temperature=0.0, max_tokens=60, grammar=JSON)
    together = smollm2_llm.generate([FREE[0], PROMPT, FREE[1]], [free, held, free])
    assert [together[0].token_ids, together[2].token_ids] == alone
    check(together[1].text)
    assert together[1].token_ids == smollm2_llm.generate(PROMPT, held)[0].token_ids


def test_a_preempted_answer_goes_on_where_it_was(smollm2_llm: LLM, smollm2: tuple) -> None:  # type: ignore[type-arg]
    held = SamplingParams(temperature=0.8, max_tokens=60, grammar=JSON, seed=5)
    prompts = [f"Person number {number}, as JSON: " for number in range(6)]
    alone = [smollm2_llm.generate(prompt, held)[0].token_ids for prompt in prompts]
    tight = EngineConfig(max_context=96, kv=KVConfig(memory_bytes=4 * BYTES_PER_MB, prefix_caching=False))
    with LLM.from_assembly(assemble(*smollm2, tight)) as llm:
        crowded = llm.generate(prompts, held)
        assert llm.assembly.engine.scheduler.counts().preemptions > 0
    assert [result.token_ids for result in crowded] == alone


def test_no_step_compiles_a_live_requests_grammar_again(smollm2_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others were checked since it was queued; and it is let go with its request."""
    monkeypatch.setattr(grammar, "NUM_KEPT", 1)
    engine, grammars = smollm2_llm.assembly.engine, smollm2_llm.assembly.grammars
    assert grammars is not None
    eos = smollm2_llm.assembly.tokenizer.eos_token_ids  # type: ignore[union-attr]
    specs = [GrammarSpec("regex", f"[a-c]{{{length}}}") for length in (3, 4)]
    for name, spec in zip(("first", "second"), specs, strict=True):
        engine.add(Request(name, (1, 2), SamplingParams(max_tokens=8, grammar=spec), eos_token_ids=eos))
    assert all(grammars.is_compiled(spec) for spec in specs)
    engine.abort("first")
    while engine.busy:
        engine.step()
    grammars.check(JSON)
    assert not any(grammars.is_compiled(spec) for spec in specs)


def test_a_thought_is_free_and_what_follows_is_not(smollm2_llm: LLM, smollm2: tuple) -> None:  # type: ignore[type-arg]
    """Alone, in a crowd that is preempted, and on a prefix hit: the same thought, then the same answer."""
    marker = smollm2[1].encode("</think>", add_special_tokens=False)  # of several tokens, which are made likely
    held = SamplingParams(
        max_tokens=90,
        top_k=12,
        seed=2,
        logit_bias=dict.fromkeys(marker, 11.0),
        grammar=GrammarSpec("choice", '["left", "right"]', thought="open"),
    )
    prompts = [f"Question {number}: left or right?\n<think>" for number in range(6)]
    alone = [smollm2_llm.generate(prompt, held)[0] for prompt in prompts]
    ended = [result for result in alone if result.samples[0].finish_reason == "stop"]
    assert len(ended) > 2
    assert all(result.text.partition("</think>")[2].strip() in ("left", "right") for result in ended)
    assert all("</think>" not in result.text for result in alone if result not in ended)
    assert [smollm2_llm.generate(prompt, held)[0].token_ids for prompt in prompts] == [r.token_ids for r in alone]
    tight = EngineConfig(max_context=128, kv=KVConfig(memory_bytes=4 * BYTES_PER_MB, prefix_caching=False))
    with LLM.from_assembly(assemble(*smollm2, tight)) as llm:
        crowded = llm.generate(prompts, held)
        assert llm.assembly.engine.scheduler.counts().preemptions > 0
    assert [result.token_ids for result in crowded] == [result.token_ids for result in alone]


def test_min_tokens_never_breaks_a_grammar(smollm2_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=10, grammar=GrammarSpec("regex", "ab?"))
    assert smollm2_llm.generate("Say it:", params)[0].text in ("a", "ab")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "strig"}', "strig"),
        ("json_schema", '{"type": ', "not valid JSON"),
        ("json_schema", "[" * 100 + "]" * 100, "nested deeper"),
        ("json_schema", '{"if": {"type": "object"}}', "if"),
        ("json_schema", "false", "JSON object"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a" * 200_000, "characters"),
        ("lark", "start: nobody", "nobody"),
        ("choice", "[]", "at least one"),
        ("choice", "[1]", "texts"),
    ],
)
def test_what_cannot_be_followed_is_refused(smollm2_llm: LLM, kind: str, text: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(words)):
        smollm2_llm.generate(PROMPT, SamplingParams(max_tokens=4, grammar=GrammarSpec(kind, text)))


def test_specs_that_make_no_sense() -> None:
    with pytest.raises(BadRequestError, match="kind"):
        GrammarSpec("gbnf", "")
    with pytest.raises(BadRequestError, match="ignore_eos"):
        SamplingParams(grammar=JSON, ignore_eos=True)


def test_an_engine_without_a_tokenizer_says_so(smollm2_llm: LLM) -> None:
    from twostroke.engine.engine import Engine

    held = smollm2_llm.assembly.engine
    engine = Engine(held.scheduler, held.backend, 49152, None)
    request = Request("1", (1, 2), replace(SamplingParams(max_tokens=4), grammar=JSON), eos_token_ids=frozenset({2}))
    with pytest.raises(BadRequestError, match="needs a tokenizer"):
        engine.add(request)
