"""Ollama's API with Ollama's own client, whole and in lines: chats, prompts, thoughts, tools, models, errors."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import ollama
import pytest
from ollama import Client
from openai import OpenAI

from tests.server.running import RunningServer
from twostroke import LLM, SamplingParams

THOUGHT, TEXT = "Let me see.", "Well, well."
SEA: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 16}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "roll_dice",
        "description": "Roll dice.",
        "parameters": {"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]},
    },
}
CAT = {
    "type": "object",
    "properties": {"mood": {"enum": ["calm", "wild"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Client:
    return Client(host=server.address, timeout=60)


@pytest.fixture(scope="module")
def scripted(scripted_server: RunningServer) -> Client:
    return Client(host=scripted_server.address, timeout=60)


def ask(client: Client, content: str, **options: Any) -> Any:
    """The scripted model, which is taken at its word."""
    return client.chat("scripted", [{"role": "user", "content": content}], options={"temperature": 0}, **options)


def test_the_text_is_that_of_chat(server: RunningServer, client: Client) -> None:
    messages: Any = [{"role": "system", "content": "You are terse."}, *SEA]
    openai = OpenAI(base_url=server.base_url, api_key="none")
    chat = openai.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=16)
    whole = client.chat("smollm2", messages, options=GREEDY)
    assert whole.message.content == chat.choices[0].message.content and whole.message.role == "assistant"
    assert whole.done and whole.done_reason == chat.choices[0].finish_reason
    assert (whole.prompt_eval_count, whole.eval_count) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    lines = list(client.chat("smollm2:latest", messages, options=GREEDY, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content and len(lines) > 5
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[0].model == "smollm2:latest" and datetime.fromisoformat(lines[0].created_at).tzinfo is not None
    generated = client.generate("smollm2", SEA[0]["content"], system="You are terse.", options=GREEDY)
    assert generated.response == whole.message.content
    pieces = list(client.generate("smollm2", SEA[0]["content"], system="You are terse.", options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == whole.message.content


def test_a_raw_prompt_goes_past_the_template(client: Client, offline: LLM) -> None:
    expected = offline.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=8))[0].text
    raw = client.generate("smollm2", "The sea is", raw=True, options={"temperature": 0, "num_predict": 8})
    assert raw.response == expected and raw.done_reason == "length"


def test_durations_are_those_of_the_phases(server: RunningServer) -> None:
    begun_ns = time.perf_counter_ns()
    body = {"model": "smollm2", "messages": SEA, "options": GREEDY, "stream": False}
    answer = server.post("/api/chat", body).json()
    wall_ns, timing = time.perf_counter_ns() - begun_ns, answer["timing"]
    assert answer["prompt_eval_duration"] == pytest.approx(timing["prefill"]["seconds"] * 1e9, abs=1000)
    assert answer["eval_duration"] == pytest.approx(timing["decode"]["seconds"] * 1e9, abs=1000)
    parts = [answer[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
    assert all(part > 0 for part in parts) and sum(parts) <= answer["total_duration"] <= wall_ns


def test_options_reach_the_engine(client: Client) -> None:
    whole = client.chat("smollm2", SEA, options=GREEDY).message.content
    stop = whole[10:14]
    cut = client.chat("smollm2", SEA, options={**GREEDY, "stop": [stop], "num_ctx": 2048, "num_thread": 8})
    assert cut.message.content == whole[: whole.index(stop)] and cut.done_reason == "stop"
    drawn = {"temperature": 1.5, "seed": 7, "num_predict": 8, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    first, second = (client.chat("smollm2", SEA, options=drawn).message.content for _ in range(2))
    assert first == second != client.chat("smollm2", SEA, options={**drawn, "seed": 8}).message.content
    punished = client.chat("smollm2", SEA, options={**GREEDY, "repeat_penalty": 50.0}).message.content
    assert punished != whole
    let_be = client.chat("smollm2", SEA, options={**GREEDY, "repeat_penalty": 50.0, "repeat_last_n": 0})
    assert let_be.message.content == whole


def test_formats(scripted: Client, client: Client) -> None:
    for think in (None, False):
        answer = ask(scripted, "A cat.", format=CAT, think=think)
        assert json.loads(answer.message.content)["mood"] in ("calm", "wild")
    text = client.generate("smollm2", "A cat, as JSON:", format="json", options={"num_predict": 5}).response
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("question", ["Hello.", "Ponder this."])
def test_a_thought_is_told_from_the_answer(scripted: Client, question: str) -> None:
    for think in (None, True, "low"):
        whole = ask(scripted, question, think=think).message
        assert (whole.thinking, whole.content) == (THOUGHT, TEXT)
    lines = list(ask(scripted, question, think=True, stream=True))
    assert "".join(line.message.thinking or "" for line in lines) == THOUGHT
    assert "".join(line.message.content or "" for line in lines) == TEXT
    generated = scripted.generate("scripted", question, options={"temperature": 0})
    assert (generated.thinking, generated.response) == (THOUGHT, TEXT)
    silent = ask(scripted, question, think=False).message
    assert silent.thinking is None and silent.content == TEXT


def test_a_model_that_cannot_think_says_so(client: Client) -> None:
    with pytest.raises(ollama.ResponseError, match='"smollm2" does not support thinking') as refused:
        client.chat("smollm2", SEA, think=True)
    assert refused.value.status_code == 400
    assert client.chat("smollm2", SEA, think=False, options=GREEDY).message.content


def test_a_call_and_its_result(scripted_server: RunningServer, scripted: Client) -> None:
    def roll_dice(sides: int) -> int:
        """Roll dice.

        Args:
          sides: How many.
        """
        return sides

    first = ask(scripted, "Roll!", tools=[roll_dice])
    call = first.message.tool_calls[0].function
    assert (call.name, call.arguments) == ("roll_dice", {"sides": 6}) and first.message.content == "Done."
    lines = list(ask(scripted, "Roll!", tools=[TOOL], stream=True))
    calls = [call.function for line in lines for call in line.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [("roll_dice", {"sides": 6})]
    turns: list[Any] = [
        {"role": "user", "content": "Roll!"},
        first.message,
        {"role": "tool", "tool_name": "roll_dice", "content": "4"},
    ]
    answer = scripted.chat("scripted", turns, tools=[TOOL], options={"temperature": 0})
    assert answer.message.content == TEXT
    # The model reads what it would read through chat.
    function = {"name": "roll_dice", "arguments": '{"sides": 6}'}
    chat = OpenAI(base_url=scripted_server.base_url, api_key="none").chat.completions.create(
        model="scripted",
        messages=[
            turns[0],
            {
                "role": "assistant",
                "content": "Done.",
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "4"},
        ],
        tools=[TOOL],
    )
    assert chat.usage.prompt_tokens == answer.prompt_eval_count


@pytest.mark.parametrize("num_predict", range(1, 10))
def test_a_call_that_is_cut_is_none(scripted_server: RunningServer, num_predict: int) -> None:
    options = {"temperature": 0, "num_predict": num_predict}
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Roll!"}],
        "tools": [TOOL],
        "options": options,
    }
    whole = scripted_server.post("/api/chat", {**body, "stream": False}).json()
    response = scripted_server.post("/api/chat", body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert all(call["arguments"] == {"sides": 6} for call in calls)
    assert "tool_call>" not in whole["message"]["content"]
    assert lines[-1]["done_reason"] == whole["done_reason"]


def test_logprobs(client: Client) -> None:
    options = {"temperature": 0, "num_predict": 6}
    whole = client.chat("smollm2", SEA, options=options, logprobs=True, top_logprobs=2)
    assert len(whole.logprobs) == 6 and all(len(entry.top_logprobs) == 2 for entry in whole.logprobs)
    lines = client.chat("smollm2", SEA, options=options, logprobs=True, stream=True)
    told = [entry.token for line in lines for entry in line.logprobs or ()]
    assert told == [entry.token for entry in whole.logprobs]


def test_a_model_is_loaded_before_it_is_asked_for_anything(client: Client) -> None:
    for answer in (client.generate("smollm2"), client.generate("smollm2", "", stream=False), client.chat("smollm2")):
        assert answer.done and answer.done_reason == "load"
    assert client.generate("smollm2", keep_alive=0).done_reason == "unload"
    assert [line.done_reason for line in client.chat("smollm2", [], stream=True)] == ["load"]
    assert client.generate("smollm2", "Hi", keep_alive="5m", options={"num_predict": 1}).eval_count == 1


def test_what_is_told_of_the_model(server: RunningServer, client: Client, scripted: Client) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == ["smollm2:latest"] and listed[0].size > 50e6
    assert len(listed[0].digest) == 64 and listed[0].details.quantization_level == "Q4_1"
    loaded = client.ps().models[0]
    assert loaded.name == "smollm2:latest" and loaded.context_length == 2048 and loaded.size > listed[0].size
    assert loaded.expires_at > datetime.now(UTC)
    shown = client.show("smollm2")
    assert shown.modelinfo["general.architecture"] == shown.details.family == "llama"
    facts = {name.removeprefix("llama."): value for name, value in shown.modelinfo.items()}
    assert facts["context_length"] == 2048 and facts["embedding_length"] == 576 and facts["block_count"] == 30
    assert shown.details.parameter_size == "134.52M" and shown.details.format == "gguf"
    assert "im_start" in shown.template and shown.capabilities == ["completion", "tools"]
    assert scripted.show("scripted:latest").capabilities == ["completion", "tools", "thinking"]
    version = server.get("/api/version").json()["version"]
    assert tuple(int(part) for part in version.split(".")) >= (0, 6, 4)
    assert server.get("/").status_code == 200


def test_nothing_is_embedded(client: Client) -> None:
    for embed in (lambda: client.embed("smollm2", "a"), lambda: client.embeddings("smollm2", "a")):
        with pytest.raises(ollama.ResponseError, match="this model does not support embeddings") as refused:
            embed()
        assert refused.value.status_code == 400


def test_a_client_that_leaves_frees_the_engine(server: RunningServer, client: Client) -> None:
    lines = client.chat("smollm2", SEA, stream=True, options={"temperature": 1.0, "num_predict": 1500})
    for _ in range(5):
        next(lines)
    lines.close()
    server.wait_until_idle()
