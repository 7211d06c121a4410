"""An agent's conversation with a hybrid, as a server plays it: a template that renders tools, calls and results as
messages, prefixes found again and the usual drafters beside an engine with neither. Every turn's tokens are equal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny_checkpoints import make_tiny
from tests.models.tiny_embedders import byte_level_tokenizer
from tests.text.agent_templates import NEMOTRON3

from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.core.kv_config import KVConfig
from twostroke.core.timing import SequenceTiming
from twostroke.server.told_tools import told_of_tools
from twostroke.speculation.budget import DraftBudget
from twostroke.text.chat_template import ChatTemplate
from twostroke.text.tool_parsers.known_formats import QWEN3_CODER

HYBRIDS = ("qwen3_5", "lfm2_moe", "granite_hybrid")
CONTROL_TOKENS = ["<|im_start|>", "<|im_end|>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name} what is asked for, and tell what came of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
        },
    }
    for name in ("read", "search", "run")
]
FILES = ("src/main.py", "tests/test_main.py", "README.md", "setup.cfg")
NUM_ANSWERED = 24
MAX_DRAFTS = 8


@dataclass
class Counts:
    turns: int = 0
    prompt_tokens: int = 0
    """Of the last turn."""
    found_again: int = 0
    drafts: int = 0
    held: int = 0

    def add(self, timing: SequenceTiming) -> None:
        self.turns += 1
        self.prompt_tokens = timing.prompt_tokens
        self.found_again += timing.cached_tokens
        self.drafts += timing.drafts_computed
        self.held += timing.drafts_held


def make_hybrid(variant: str, folder: Path) -> Path:
    """With a byte a token, and room for a long conversation."""
    make_tiny(variant, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 32_768}))
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(CONTROL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(NEMOTRON3)
    return folder


def results(draw: random.Random, size: int) -> str:
    """Lines of a file, many of them alike, as code is."""
    lines = [f"    {draw.choice(('value', 'found', 'total'))} = read({draw.randrange(9)})\n" for _ in range(size // 24)]
    return "".join(lines)


def agent(num_turns: int, size: int) -> Iterator[list[dict[str, Any]]]:
    """What an agent adds before each of the model's turns. It takes the answer for the words beside a call."""
    draw = random.Random(11)
    yield [{"role": "user", "content": "Find out why the tests fail, and mend it."}]
    for turn in range(1, num_turns):
        if turn % 10 == 9:
            yield [{"role": "user", "content": f"Go on with {draw.choice(FILES)}."}]
            continue
        name, arguments = draw.choice(("read", "search", "run")), {"path": draw.choice(FILES), "lines": turn}
        call = {"id": f"call{turn}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        yield [{"tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": results(draw, size)}]


def talk(folder: Path, backend: str, num_turns: int, size: int, max_context: int) -> Counts:
    plain_config = EngineConfig(
        backend=backend, speculate="off", kv=KVConfig(prefix_caching=False), max_context=max_context, threads=2
    )
    quick_config = EngineConfig(backend=backend, speculate="auto", max_context=max_context, threads=2)
    counts, template = Counts(), ChatTemplate(NEMOTRON3, special_tokens=CONTROL_TOKENS)
    with LLM(folder, plain_config) as plain, LLM(folder, quick_config) as quick:
        # Every draft pays, on whatever machine: a step takes as long with drafts as without.
        quick.engine.scheduler.draft(DraftBudget(lambda work: 1.0, MAX_DRAFTS, tuple(quick.engine.draft_methods)))
        # The model says letters: what it says is the same tokens when it is read again.
        letters = {token for text in map(chr, range(32, 127)) for token in plain.tokenizer.encode(text)}
        bias = {token: -100.0 for token in range(256) if token not in letters}
        sampling = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True, logit_bias=bias)
        messages: list[dict[str, Any]] = []
        for turn, new in enumerate(agent(num_turns, size)):
            if "tool_calls" in new[0]:
                messages[-1] = messages[-1] | new.pop(0)
            messages += new
            told = told_of_tools(messages, TOOLS, plain.tokenizer, QWEN3_CODER)
            prompt = plain.tokenizer.encode(template.render(told, tools=TOOLS), add_special_tokens=False)
            (expected,), (found,) = (llm.generate(prompt, sampling)[0].samples for llm in (plain, quick))
            assert found.token_ids == expected.token_ids, f"turn {turn}"
            counts.add(found.timing)
            messages.append({"role": "assistant", "content": expected.text})
        assert plain.engine.scheduler.counts().prefix_hit_tokens == 0
        for llm in (plain, quick):
            llm.engine.scheduler.check()
    template.close()
    return counts


@pytest.mark.parametrize("variant", HYBRIDS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_turn_says_the_same(variant: str, backend: str, tmp_path: Path) -> None:
    counts = talk(make_hybrid(variant, tmp_path / "m"), backend, num_turns=6, size=240, max_context=4096)
    assert counts.found_again > counts.prompt_tokens and counts.turns == 6
    assert counts.held > 20


@pytest.mark.slow
@pytest.mark.parametrize("variant", HYBRIDS)
def test_forty_turns_and_twenty_thousand_tokens(variant: str, tmp_path: Path) -> None:
    counts = talk(make_hybrid(variant, tmp_path / "m"), "cpu", num_turns=40, size=500, max_context=24_000)
    print(variant, counts)
    assert counts.turns == 40 and counts.prompt_tokens > 19_000
    assert counts.found_again > 40 * 19_000 // 3 and counts.held > 200
