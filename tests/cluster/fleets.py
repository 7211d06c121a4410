"""A fleet of real servers on SmolLM2: who reads, who writes, and one that does both alone, to compare with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import RunningServer, running_server

KEY = "a key that only this fleet has"
PLAIN_OPTIONS = ("smollm2", "--backend", "cpu", "--threads", "1", "--max-context", "2048", "--kv-memory", "200MB")
OPTIONS = (*PLAIN_OPTIONS, "--check-steps")
"""Every engine proves its books after every step."""
FLEET_OPTIONS = ("--kv-host-gb", "0.3", "--drain", "2", "--hand-over", "all")
"""Short prompts are handed over, too: here it is looked at how."""
WORDS = (Path(__file__).resolve().parents[2] / "LICENSE").read_text().split()
NOBODY = "127.0.0.1:2"
"""Where nobody writes."""
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}


@contextmanager
def servers(
    folder: Path,
    *roles: str,
    transfer: str = "sockets",
    options: tuple[str, ...] = (),
    of_all: tuple[str, ...] = OPTIONS,
    of_fleet: tuple[str, ...] = FLEET_OPTIONS,
) -> Iterator[Any]:
    """One a role; `alone` is of no fleet."""
    with ExitStack() as stack:
        started = []
        for number, role in enumerate(roles):
            flags = () if role == "alone" else ("--role", role, "--transfer", transfer, *of_fleet)
            running = running_server(folder / f"log-{number}", *of_all, *flags, *options, TWOSTROKE_FLEET_KEY=KEY)
            started.append(stack.enter_context(running))
        yield tuple(started)


def read(reader: RunningServer, path: str, body: dict[str, Any], writer: str = "") -> Any:
    """The first leg: what goes to the second."""
    return first_leg(reader, path, body, writer).get("kv_transfer_params")


def named_by_vllm_router(writer: str) -> dict[str, str]:
    """A header that has the address of whoever will write."""
    return {"x-request-id": f"___prefill_addr_127.0.0.1:1___decode_addr_{writer}_0123456789abcdef"}


def first_leg(reader: RunningServer, path: str, body: dict[str, Any], writer: str = "") -> Any:
    """As routers send it: the whole request, unstreamed, one token, in the words of OpenAI whatever the route.
    `writer`: as vllm-router names it; empty: as smg, which names none."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {**body, limit: 1, "stream": False, "kv_transfer_params": ASKS}
    asked.pop("stream_options", None)
    answer = reader.post(path, asked, headers=named_by_vllm_router(writer) if writer else None)
    assert answer.status_code == 200, answer.text
    return answer.json()


def write(writer: RunningServer, path: str, body: dict[str, Any], params: Any) -> httpx.Response:
    """The second leg: the request as it came, with what the first one answered."""
    return writer.post(path, {**body, **({} if params is None else {"kv_transfer_params": params})})


def told(answer: httpx.Response) -> Any:
    """What a client is told, but for ids and times. Events of a stream are sorted by sample: which of two comes first
    is a matter of the moment."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return sorted((_bare(json.loads(event)) for event in events[:-1]), key=_sample)
    return _bare(answer.json())


def _sample(event: Any) -> int:
    """Those of no sample come last."""
    return min((choice["index"] for choice in event.get("choices", ())), default=1 << 30)


def _bare(given: Any) -> Any:
    if isinstance(given, dict):
        left_out = ("id", "created", "timing", "prompt_tokens_details", "kv_transfer_params")
        return {name: _bare(value) for name, value in given.items() if name not in left_out}
    if isinstance(given, float):
        return round(given, 9)  # vllm-router reads numbers and writes them anew, and the last digit may be another
    return [_bare(one) for one in given] if isinstance(given, list) else given


def drawn_request(number: int, words: list[str], seed: int) -> tuple[str, dict[str, Any]]:
    """A path and a body: greedy and drawn, logprobs, grammars, several samples, stops, streams, shared prefixes."""
    text = " ".join(words)
    common: dict[str, Any] = {"max_tokens": 4 + number % 9, "temperature": 0.0 if number % 3 else 0.9, "seed": seed}
    if number % 4 == 0:
        common["logprobs"] = 2
    if number % 5 == 1:
        common["n"] = 2
    if number % 7 == 2:
        common["stop"] = [" the", "\n"]
    if number % 6 == 3:
        common["stream"] = True
    if number % 8 == 5:
        common["guided_regex"] = "[a-z ]{3,20}\\."
    if number % 2:
        return "/v1/completions", {"model": "smollm2", "prompt": f"{text}\n", **common}
    if "logprobs" in common:
        common |= {"logprobs": True, "top_logprobs": 2}
    shared = "You are a clerk who answers in as few words as can be, and always in English. " * (1 + number % 4)
    messages = [{"role": "system", "content": shared}, {"role": "user", "content": f"{text}?"}]
    return "/v1/chat/completions", {"model": "smollm2", "messages": messages, **common}


# APIs of others


def body_of(path: str) -> dict[str, Any]:
    """Of eight tokens, greedy; each route has a prompt of its own."""
    text = " ".join(random.Random(path).choices(WORDS, k=120))
    messages, options = [{"role": "user", "content": text}], {"num_predict": 8, "temperature": 0.0}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": text, "max_output_tokens": 8, "temperature": 0.0},
        "/v1/messages": {"messages": messages, "max_tokens": 8, "temperature": 0.0},
        "/api/chat": {"messages": messages, "options": options, "stream": False},
        "/api/generate": {"prompt": text, "options": options, "stream": False},
    }
    return {"model": "smollm2", **bodies[path]}


TEXTS: dict[str, Callable[[Any], str]] = {
    "/v1/responses": lambda answer: answer["output"][0]["content"][0]["text"],
    "/v1/messages": lambda answer: answer["content"][0]["text"],
    "/api/chat": lambda answer: answer["message"]["content"],
    "/api/generate": lambda answer: answer["response"],
}
