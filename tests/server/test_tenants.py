"""Two API keys on one server: neither learns what the other asked, neither keeps the other waiting, and the log has a
line for each request and no word of it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import ANSWER_LIMIT_S, RunningServer, running_server
from twostroke.server.tenants import Tenants

ALICE = {"Authorization": "Bearer alice-key"}
BOB = {"Authorization": "Bearer bob-key"}
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3
GREEDY = {"temperature": 0, "ignore_eos": True}
NUM_PROMPTS = 128


@pytest.fixture(scope="module")
def shared(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    limits = ("--max-per-key", "3", "--max-samples-per-key", "300", "--max-tokens-per-key", "300000")
    options = (*MODEL_OPTIONS, *limits, "--access-log", "--max-queue", "1000")
    folder = tmp_path_factory.mktemp("shared")
    with running_server(folder / "log", *options, TWOSTROKE_API_KEYS="alice-key,bob-key") as server:
        yield server


def cached_tokens(server: RunningServer, key: dict[str, str], **more: object) -> int:
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 2, **more}
    answer = server.post("/v1/completions", body, headers=key).json()
    assert answer["timing"]["prefill"]["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_does_not_find_what_another_has_cached(shared: RunningServer) -> None:
    assert cached_tokens(shared, ALICE) == 0
    assert cached_tokens(shared, BOB) == 0
    assert cached_tokens(shared, ALICE) > 30  # its own it does
    assert cached_tokens(shared, BOB) > 30
    assert cached_tokens(shared, ALICE, cache_salt="mine") == 0  # and a salt divides further
    for guess in ("mine", "/mine", "alice-key/mine"):
        assert cached_tokens(shared, BOB, cache_salt=guess) == 0
    assert cached_tokens(shared, ALICE, cache_salt="mine") > 30


def test_nor_is_it_told_of_another_keys_prompt_in_words(shared: RunningServer) -> None:
    """A verdict names the token where a prompt leaves what was cached; and what is kept is found by its key alone."""
    secret = "My account number is 4711, and nobody else may know it. " * 20
    body = {**GREEDY, "max_tokens": 2}
    asked = shared.post("/v1/completions", {**body, "prompt": secret}, headers=ALICE).json()
    guess = shared.post("/v1/completions", {**body, "prompt": secret.replace("4711", "4712")}, headers=BOB).json()
    kept = shared.get(f"/v1/twostroke/requests/{guess['id']}", headers=BOB)
    for text in (json.dumps(guess["timing"]), kept.text):
        assert not re.search("evicted|differs|leaves|[1-9][0-9]* more were cached", text)
    assert shared.get(f"/v1/twostroke/requests/{asked['id']}", headers=BOB).status_code == 404
    assert shared.get("/v1/twostroke/requests/last", headers=BOB).json()["id"] == guess["id"]
    shown = shared.get("/v1/twostroke/top", headers=BOB).json()["requests"]
    assert asked["id"] not in [request["id"] for request in shown]


def test_the_access_log_has_a_line_a_request_and_nothing_that_was_asked(shared: RunningServer) -> None:
    body = {**GREEDY, "prompt": "zebra crossing", "max_tokens": 1}
    assert shared.post("/v1/completions", body, headers=BOB).status_code == 200
    assert shared.get("/v1/models?zebra=1", headers=ALICE).status_code == 200
    assert shared.get("/v1/nothing%0aforged%20line", headers=ALICE).status_code == 404
    assert shared.get("/health").status_code == 200
    assert shared.get("/v1/models").status_code == 401
    told = ("POST /v1/completions 200", "GET /v1/models 200", "GET /health 200", "GET /v1/models 401")
    for asked in (*told, "GET /v1/nothing%0aforged%20line 404"):  # each once its answer is over, in any order
        pattern = rf'127\.0\.0\.1\S* "?{asked}"? [0-9.]+ m?s.*'
        shared.wait_until(lambda p=pattern: any(re.fullmatch(p, line) for line in shared.log().splitlines()))  # type: ignore[misc]
    shown = shared.log()
    for secret in ("zebra", "quick brown", "alice-key", "bob-key"):
        assert secret not in shown
    assert not any(line.startswith("forged") for line in shown.splitlines())


def test_hundreds_of_prompts_of_one_key_do_not_keep_another_waiting(shared: RunningServer) -> None:
    """Two requests of 128 prompts each: what the other key asks is answered before one of those 256 answers ends."""

    def ended() -> float:
        return shared.metric("twostroke_requests_total", headers=BOB)

    def flood(number: int) -> socket.socket:
        body = {
            **GREEDY,
            "prompt": [f"{number} {i}" for i in range(NUM_PROMPTS)],
            "max_tokens": 1000,
            "speculation": "off",
        }
        payload = json.dumps(body).encode()
        host, port = shared.address.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: {ALICE['Authorization']}\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        return connection

    def metric(name: str) -> float:
        return shared.metric(f"twostroke_{name}", headers=BOB)

    ended_before = ended()
    with flood(0), flood(1):
        shared.wait_until(lambda: metric("running") >= 64 and metric("running") + metric("waiting") == 2 * NUM_PROMPTS)
        for _ in range(2):
            body = {**GREEDY, "prompt": "Two tokens, please.", "max_tokens": 2, "seed": 1}
            answer = shared.post("/v1/completions", body, headers=BOB)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
        assert ended() - ended_before == 2, "answers of the flood have ended meanwhile"
        check_limits(shared)
    shared.wait_until_idle(headers=BOB)
    assert shared.post("/v1/completions", {**GREEDY, "prompt": "Hi", "max_tokens": 1}, headers=ALICE).is_success


def check_limits(server: RunningServer) -> None:
    """While one key has 256 samples in flight, of 300, and 256 thousand tokens, of 300."""
    cases = [
        ({"prompt": ["a"] * 45, "max_tokens": 1}, 429, "samples_limit", ("256", "45", "300")),
        ({"prompt": ["a"] * 24, "n": 2, "max_tokens": 1}, 429, "samples_limit", ("256", "48", "300")),
        ({"prompt": ["a"] * 40, "max_tokens": 1999}, 429, "tokens_limit", ("80000", "300000")),
        ({"prompt": ["a"] * 160, "n": 1, "max_tokens": 1999}, 400, "tokens_limit", ("320000", "300000")),
    ]
    for body, status, code, numbers in cases:
        refused = server.post("/v1/completions", {**GREEDY, **body}, headers=ALICE if status == 429 else BOB)
        assert refused.status_code == status, refused.text
        error = refused.json()["error"]
        assert error["code"] == code
        for number in numbers:
            assert number in error["message"], error["message"]
        assert ("retry-after" in refused.headers) is (status == 429)
    assert server.metric("twostroke_rejected_total", headers=BOB, reason="key_samples") >= 2


@pytest.mark.slow
def test_keys_share_what_is_cached_where_the_operator_says_so(smollm2_path: Path, tmp_path: Path) -> None:
    options = (*MODEL_OPTIONS, "--share-prefixes")
    with running_server(tmp_path / "log", *options, TWOSTROKE_API_KEYS="alice-key,bob-key") as server:
        assert cached_tokens(server, ALICE) == 0
        assert cached_tokens(server, BOB) > 30
        assert cached_tokens(server, BOB, cache_salt="mine") == 0
        assert cached_tokens(server, ALICE, cache_salt="mine") > 30  # who knows the salt shares it


def test_no_salt_of_a_request_reaches_the_space_of_another_key() -> None:
    tenants = Tenants(["a", "b"], share_prefixes=False)
    for guess in ("", "x", tenants.name(0), tenants.salt(0, "x"), "/x"):
        assert tenants.salt(1, guess) not in {tenants.salt(0, salt) for salt in ("", "x", guess)}
    assert tenants.salt(0, "x") != tenants.salt(0, "")
    assert Tenants(["a"], share_prefixes=False).name(0) != tenants.name(0)  # nothing to be worked out from a key
    lasting = [Tenants(["a", "b"], share_prefixes=False, secret=b"kept with KV on disk") for _ in range(2)]
    assert lasting[0].salt(0, "x") == lasting[1].salt(0, "x") != lasting[1].salt(1, "x")
    assert tenants.salt(-1, "x") == Tenants([], share_prefixes=False).salt(-1, "x") == "x"
    assert Tenants(["a", "b"], share_prefixes=True).salt(1, "x") == "x"
