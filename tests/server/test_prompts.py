"""Prompts of any length and kind: who sends one too long is told so at little cost, others do not wait, and what is
counted by /tokenize is what chat reads."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, cpu_s
from twostroke import LLM

LONG = ("The quick brown fox jumps over the lazy dog, number 12345. " * 120_000)[:7_000_000]
BODIES: dict[str, tuple[str, Any]] = {
    "completion": ("/v1/completions", {"prompt": LONG}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "forged": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|im_end|>" * 700_000}]}),
    "responses": ("/v1/responses", {"input": LONG}),
    "many": ("/v1/completions", {"prompt": [LONG[:170_000]] * 40}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG[:1700]}] * 4000}),
    "tool": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi."}],
            "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
        },
    ),
}


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def watched(server: RunningServer) -> Iterator[list[float]]:
    """How long /health takes meanwhile, again and again."""
    waits_s, done = [0.0], threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not done.wait(0.05):
                began_s = time.monotonic()
                client.get(server.address + "/health")
                waits_s.append(time.monotonic() - began_s)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits_s
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("name", BODIES)
def test_a_long_prompt_costs_little_and_holds_up_nobody(server: RunningServer, name: str) -> None:
    """Tokenising it here would take seconds of this process's time, and a gigabyte of its memory."""
    path, body = BODIES[name]
    pid = server.process.pid
    began_cpu_s, began_bytes = cpu_s(pid), peak_bytes(pid)
    with watched(server) as waits_s:
        answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "the context is 2048 tokens" in error["message"]
    assert cpu_s(pid) - began_cpu_s < 1.5
    assert peak_bytes(pid) - began_bytes < 200e6
    assert max(waits_s) < 3.0  # a quiet machine: some 30 ms


def test_what_only_counting_shows_to_be_too_long_is_counted_elsewhere(server: RunningServer, offline: LLM) -> None:
    prompt = LONG[:150_000]  # of words that are rarely as long as the vocabulary's longest
    num_tokens = len(offline.tokenizer.encode(prompt))
    began_cpu_s = cpu_s(server.process.pid)
    answer = server.post("/v1/completions", {"prompt": prompt})
    assert answer.status_code == 400 and f"the prompt has {num_tokens} tokens" in answer.json()["error"]["message"]
    assert cpu_s(server.process.pid) - began_cpu_s < 0.5


def test_a_long_text_is_counted_whole(server: RunningServer, offline: LLM) -> None:
    for text in (LONG[:70_000], "é" * 50_000):
        tokens = server.post("/tokenize", {"prompt": text}).json()
        assert tokens["tokens"] == offline.tokenizer.encode(text) and tokens["count"] == len(tokens["tokens"])
    messages = [{"role": "user", "content": LONG[:70_000] + "<|im_end|>"}]
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == offline.chat_token_ids(messages)


def tokenizers_of(server: RunningServer) -> list[int]:
    pid = server.process.pid
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    found = []
    for child in (child for listed in children for child in listed):
        try:
            if b"tokenizer_worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
        except OSError:  # it has just ended
            continue
    return found


def test_a_client_that_leaves_is_not_tokenised_for(server: RunningServer) -> None:
    def is_at_work(pid: int) -> bool:
        return pid not in before_s or cpu_s(pid) > before_s[pid] + 0.5

    body = json.dumps({"prompt": LONG}).encode()  # several seconds of work, for /tokenize knows no context
    host, port = server.address.removeprefix("http://").split(":")
    head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    before_s = {pid: cpu_s(pid) for pid in tokenizers_of(server)}
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        begun_by_s = time.monotonic() + 120
        while not (begun := [pid for pid in tokenizers_of(server) if is_at_work(pid)]):
            assert time.monotonic() < begun_by_s
            time.sleep(0.02)
    ended_by_s = time.monotonic() + 60
    while set(begun) & set(tokenizers_of(server)):
        assert time.monotonic() < ended_by_s, "it goes on for nobody"
        time.sleep(0.05)
    assert server.post("/tokenize", {"prompt": LONG[:70_000]}).status_code == 200


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALLED = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "Is it raining in Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
QUESTION = [{"role": "user", "content": "Is it raining in Oslo?"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": QUESTION},
        {"messages": QUESTION, "tools": TOOLS},
        {"messages": QUESTION, "tools": TOOLS, "tool_choice": "none"},
        {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required"},
        {"messages": CALLED, "tools": TOOLS},
        {"messages": CALLED},
        {"messages": QUESTION, "chat_template_kwargs": {"enable_thinking": False, "self": 1}},
        {"messages": QUESTION, "chat_template_kwargs": {"add_generation_prompt": False}},
    ],
)
def test_tokenize_counts_what_chat_reads(server: RunningServer, body: dict[str, Any]) -> None:
    tokens = server.post("/tokenize", body).json()
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert tokens["count"] == len(tokens["tokens"]) == answer.json()["usage"]["prompt_tokens"]


def test_tokenize_refuses_what_chat_refuses(server: RunningServer) -> None:
    for body in (
        {"messages": QUESTION, "tools": [{"type": "function"}]},
        {"messages": QUESTION, "tool_choice": "required"},
        {"messages": QUESTION, "chat_template_kwargs": {"messages": []}},
        {"messages": []},
    ):
        mine, chats = server.post("/tokenize", body), server.post("/v1/chat/completions", body)
        assert mine.status_code == chats.status_code == 400
    assert server.post("/tokenize", {"messages": QUESTION, "prompt": "x"}).status_code == 400


def test_tokenize_without_the_answers_beginning_and_with_texts(server: RunningServer, offline: LLM) -> None:
    whole = server.post("/tokenize", {"messages": QUESTION, "return_token_strs": True}).json()
    assert "".join(whole["token_strs"]) == offline.tokenizer.decode(whole["tokens"], skip_special_tokens=False)
    cut = server.post("/tokenize", {"messages": QUESTION, "add_generation_prompt": False}).json()
    assert cut["tokens"] == whole["tokens"][: cut["count"]] and cut["count"] < whole["count"]
    assert cut["token_strs"] is None


def test_tokenizer_info(server: RunningServer, offline: LLM) -> None:
    info = server.get("/tokenizer_info").json()
    tokenizer = offline.tokenizer
    assert info["chat_template"] == tokenizer.chat_template and info["vocab_size"] == tokenizer.vocab_size
    assert info["model_max_length"] == server.get("/v1/models").json()["data"][0]["max_model_len"]
    assert info["tokenizer_class"] and info["eos_token"] == tokenizer.eos_token and info["add_bos_token"] is False
    for token_id, token in list(info["added_tokens_decoder"].items())[:3]:
        ids = server.post("/tokenize", {"prompt": token["content"], "add_special_tokens": False}).json()["tokens"]
        assert ids == [int(token_id)]
    assert info["eos_token"] in info["additional_special_tokens"]
