"""Classes of requests on a running server: named in every API, bound to keys, refused rather than late, counted,
explained, and turned into advice on how many replicas the load asks for."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI, PermissionDeniedError, RateLimitError
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import ANSWER_LIMIT_S, RunningServer, running_server

ROOT = Path(__file__).resolve().parents[2]
LEVELS = """
[levels.chat]
ttft_ms = 30000
itl_ms = 30000
weight = 2.0

[levels.hopeless]
ttft_ms = 0.001
itl_ms = 0.001

[levels.strict]
ttft_ms = 600
when_late = "refuse"

[levels.never]
ttft_ms = 0.001
when_late = "refuse"

[levels.flex]
weight = 0.5

[keys]
alice = "strict"
"bob-*" = "flex"
"*" = "default"
"""
ALICE, BOB, ROOT_KEY = ({"Authorization": f"Bearer {key}"} for key in ("alice-key", "bob-key", "root-key"))
QUESTION = [{"role": "user", "content": "Say hello."}]
SHORT = {"temperature": 0, "max_tokens": 2}
LONG_PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 16


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("levels")
    (folder / "levels.toml").write_text(LEVELS)
    (folder / "keys").write_text("# a name, and a key\nalice alice-key\nbob-key\n")
    options = ("--service-levels", str(folder / "levels.toml"), "--api-key-file", str(folder / "keys"))
    levels = (folder / "levels.toml").read_text().replace('"*" = "default"', 'root = "all"\n"*" = "default"')
    (folder / "levels.toml").write_text(levels + "\n[levels.all]\nttft_ms = 0.0005\nitl_ms = 0.0005\nweight = 9.0\n")
    environment = {"TWOSTROKE_API_KEYS": "root root-key"}
    with running_server(folder / "log", *MODEL_OPTIONS, *options, "--max-running", "4", **environment) as running:
        # Before anything was measured, nobody is refused.
        first = {"prompt": LONG_PROMPT, "max_tokens": 8, "service_level": "never"}
        assert running.post("/v1/completions", first, headers=ROOT_KEY).status_code == 200
        for number in range(3):
            more = {"prompt": f"{number} {LONG_PROMPT}", "max_tokens": 8}
            assert running.post("/v1/completions", more, headers=ROOT_KEY).status_code == 200
        yield running


def client(server: RunningServer, key: str = "root-key", max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key=key, max_retries=max_retries, timeout=ANSWER_LIMIT_S)


def served(timing: Any) -> tuple[str, Any, Any]:
    return timing["service_level"], timing["promised"], timing["kept"]


CHAT = ("chat", {"ttft_s": 30.0, "itl_s": 30.0}, {"ttft": True, "itl": True})
HOPELESS = ("hopeless", {"ttft_s": 1e-6, "itl_s": 1e-6}, {"ttft": False, "itl": False})


@pytest.mark.parametrize(("level", "expected"), [("chat", CHAT), ("hopeless", HOPELESS)])
def test_a_request_names_its_class_in_every_api(server: RunningServer, level: str, expected: Any) -> None:
    openai, named = client(server), {"extra_body": {"service_level": level}}
    chat = openai.chat.completions.create(model="smollm2", messages=QUESTION, **SHORT, **named)  # type: ignore[arg-type]
    assert served(chat.timing) == expected  # type: ignore[attr-defined]
    text = openai.completions.create(model="smollm2", prompt="Hello", **SHORT, **named)  # type: ignore[arg-type]
    assert served(text.timing) == expected  # type: ignore[attr-defined]
    response = openai.responses.create(model="smollm2", input="Say hello.", max_output_tokens=2, **named)  # type: ignore[arg-type]
    assert served(response.timing) == expected  # type: ignore[attr-defined]
    anthropic = Anthropic(base_url=server.address, api_key="root-key", max_retries=0)
    message = anthropic.messages.create(model="smollm2", messages=QUESTION, max_tokens=2, **named)  # type: ignore[arg-type]
    assert served(message.timing) == expected  # type: ignore[attr-defined]
    options = {"service_level": level, "num_predict": 2}
    for path, asked in (("/api/chat", {"messages": QUESTION}), ("/api/generate", {"prompt": "Hi"})):
        body = {"model": "smollm2", "stream": False, "options": options, **asked}
        assert served(server.post(path, body, headers=ROOT_KEY).json()["timing"]) == expected


def test_an_unknown_class_is_refused_in_every_apis_shape(server: RunningServer) -> None:
    with pytest.raises(BadRequestError, match=r"service_level must be one of all, .*, not 'gold'") as refused:
        client(server).chat.completions.create(
            model="smollm2",
            messages=QUESTION,  # type: ignore[arg-type]
            extra_body={"service_level": "gold"},
        )
    assert refused.value.param == "service_level"
    messages = {"model": "smollm2", "messages": QUESTION, "max_tokens": 2, "service_level": "gold"}
    answer = server.post("/v1/messages", messages, headers=ROOT_KEY)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    chat = {"model": "smollm2", "messages": QUESTION, "options": {"service_level": "gold"}}
    answer = server.post("/api/chat", chat, headers=ROOT_KEY)
    assert answer.status_code == 400 and answer.json()["error"].startswith("options.service_level must be one of")


def test_a_key_has_its_class_and_no_better_one(server: RunningServer) -> None:
    body = {"prompt": "Hello", **SHORT}
    of_key = server.post("/v1/completions", body, headers=BOB).json()["timing"]
    assert of_key["service_level"] == "flex" and of_key["promise"] is None
    with pytest.raises(PermissionDeniedError, match="'chat' is not for this API key, which may have flex") as refused:
        client(server, "bob-key").completions.create(
            model="smollm2", prompt="Hello", extra_body={"service_level": "chat"}
        )
    assert refused.value.code == "service_level_not_allowed"


@pytest.mark.parametrize(("tier", "level"), [("flex", "flex"), ("priority", "all"), ("auto", "all"), (None, "all")])
def test_openais_tier_is_a_class_where_one_has_its_name(server: RunningServer, tier: Any, level: str) -> None:
    found = client(server).chat.completions.create(model="smollm2", messages=QUESTION, service_tier=tier, **SHORT)  # type: ignore[arg-type,call-overload]
    assert found.timing["service_level"] == level


def test_an_explanation_says_what_was_promised_and_who_took_the_time(server: RunningServer) -> None:
    body = {"prompt": LONG_PROMPT, **SHORT, "service_level": "hopeless"}
    timing = server.post("/v1/completions", body, headers=ROOT_KEY).json()["timing"]
    assert re.match(
        r"the class hopeless promises a first token in 1 µs, and it came in [\d.]+ m?s: [\d.]+ m?s went into "
        r"(reading its own [\d,]+ tokens?|other programs on the cores).*; and gaps of at most 1 µs, and 1 of 1 were",
        timing["promise"],
    ), timing["promise"]
    kept = server.get("/v1/twostroke/requests/last", headers=ROOT_KEY).json()
    assert kept["choices"][0]["timing"] == timing
    top = server.get("/v1/twostroke/top", headers=ROOT_KEY).json()
    assert {"default", "chat"} <= {level["name"] for level in top["engine"]["levels"]}


@contextmanager
def flood(server: RunningServer, level: str, number: int = 16) -> Iterator[None]:
    """Urgent prompts of a class, in one call whose client leaves in the end. The engine tells how many wait twice a
    second: a flood that was over before it told is followed by another."""
    host, port = server.address.removeprefix("http://").split(":")

    def is_there() -> bool:
        return server.metric("twostroke_waiting", headers=ROOT_KEY) > number // 2

    while True:
        prompts = [f"{index} {time.time()} {LONG_PROMPT}" for index in range(number)]
        body = json.dumps({"prompt": prompts, "max_tokens": 1, "service_level": level, "priority": -100}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: {ROOT_KEY['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S) as connection:
            connection.sendall(head.encode() + body)
            server.wait_until(lambda here=connection: is_answered(here) or is_there())  # type: ignore[misc]
            if not is_answered(connection):
                yield
                return
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def is_answered(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_what_would_be_late_is_refused_with_when_to_come_back_and_is_served_then(server: RunningServer) -> None:
    """The flood goes before it: it is of the same key, is more urgent, and was promised nothing that is lost."""
    asked: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "extra_body": {"service_level": "strict"}}
    seen: list[tuple[float, httpx.Response]] = []
    hooks = {"response": [lambda response: seen.append((time.monotonic(), response))]}
    patient = OpenAI(
        base_url=server.base_url, api_key="root-key", max_retries=100, http_client=httpx.Client(event_hooks=hooks)
    ).with_options(timeout=ANSWER_LIMIT_S)
    refused_before = server.metric("twostroke_rejected_total", headers=ROOT_KEY, reason="promise")
    with ThreadPoolExecutor(1) as pool:
        with flood(server, "flex"):
            with pytest.raises(RateLimitError, match="the class strict promises a first token in 600 ms") as refused:
                client(server).chat.completions.create(**asked, stream=True)
            headers = refused.value.response.headers
            whole_s, fine_ms = int(headers["retry-after"]), int(headers["retry-after-ms"])
            assert refused.value.code == "promise_cannot_be_kept" and refused.value.status_code == 429
            assert whole_s >= 1 and (whole_s - 1) * 1000 < fine_ms <= whole_s * 1000
            waiting = pool.submit(patient.chat.completions.create, **asked, **SHORT)
            server.wait_until(lambda: len(seen) > 0)
        answer = waiting.result(ANSWER_LIMIT_S)
    assert answer.usage.completion_tokens == 2 and answer.timing["service_level"] == "strict"
    statuses = [response.status_code for _, response in seen]
    assert statuses[-1] == 200 and set(statuses[:-1]) == {429}
    told_s = [int(response.headers["retry-after-ms"]) / 1e3 for _, response in seen[:-1]]
    for told, (earlier_s, _), (later_s, _) in zip(told_s, seen, seen[1:], strict=False):
        assert told > 60.0 or later_s - earlier_s >= told  # the client trusts no longer wait
    assert server.metric("twostroke_rejected_total", headers=ROOT_KEY, reason="promise") == refused_before + len(seen)


def test_what_could_never_be_in_time_is_not_told_to_come_back(server: RunningServer) -> None:
    body = {"prompt": LONG_PROMPT, **SHORT, "service_level": "never"}
    refused = server.post("/v1/completions", body, headers=ROOT_KEY)
    assert refused.status_code == 400 and "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert error["code"] == "promise_cannot_be_kept" and "reading this prompt alone takes" in error["message"]


def test_a_load_of_prompts_asks_for_more_replicas_that_read(server: RunningServer) -> None:
    assert server.get("/autoscale").status_code == 401
    assert server.get("/autoscale?horizon_s=-1", headers=ROOT_KEY).status_code == 400
    server.wait_until_idle(headers=ROOT_KEY)
    idle = server.get("/autoscale", headers=ROOT_KEY).json()
    assert idle["signals"]["waiting"] == 0 and idle["decode"]["replicas"] == 1
    with flood(server, "hopeless"):
        busy = server.get("/autoscale", headers=ROOT_KEY).json()
    assert busy["prefill"]["replicas"] > 4, busy
    assert "promises a first token in 0.00" in busy["prefill"]["why"] and busy["signals"]["prefill_backlog_s"] > 0.0
    assert {level["name"] for level in busy["signals"]["levels"]} >= {"default", "chat", "flex"}
    assert busy["both"] in (busy["prefill"], busy["decode"]) and busy["horizon_s"] == 60.0


def test_classes_are_counted_by_what_they_promised_and_kept(server: RunningServer) -> None:
    def count(name: str, **labels: str) -> float:
        return server.metric(f"twostroke_{name}", headers=ROOT_KEY, **labels)

    server.wait_until_idle(headers=ROOT_KEY)  # those that left are counted, too
    names = ("flex", "chat", "hopeless")
    before = {name: count("level_requests_total", service_level=name) for name in names}
    kept = count("promises_total", service_level="chat", phase="decode", outcome="kept")
    broken = count("promises_total", service_level="hopeless", phase="prefill", outcome="broken")
    good = [count("good_requests_total", service_level=name) for name in names]
    for name in ("chat", "hopeless"):
        body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, "n": 2, "service_level": name}
        assert server.post("/v1/completions", body, headers=ROOT_KEY).is_success
        assert count("level_requests_total", service_level=name) == before[name] + 2
    assert count("promises_total", service_level="chat", phase="decode", outcome="kept") == kept + 2
    assert count("promises_total", service_level="hopeless", phase="prefill", outcome="broken") == broken + 2
    assert [count("good_requests_total", service_level=name) for name in names] == [good[0], good[1] + 2, good[2]]
    assert count("goodput", service_level="chat") > 0.0
    assert count("promised_seconds", service_level="chat", phase="prefill") == 30.0


def test_every_metric_of_classes_is_defined_and_the_dashboard_shows_them(server: RunningServer) -> None:
    families = {family.name for family in text_string_to_metric_families(server.get("/metrics", headers=ROOT_KEY).text)}
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for name in families:
        assert f"`{name}" in documented, f"docs/metrics.md does not define {name}"
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    for name in ("prefill_backlog_seconds", "kv_full_seconds", "headroom_seconds", "good_requests", "promises", "load"):
        assert f"twostroke_{name}" in shown
