"""The generated API description, and requests that schemathesis makes from it: valid ones and such as break it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from tests.properties import examples
from tests.server.running import RunningServer

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/api/show"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/rerank"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/twostroke/requests/{request_id}"),
    ("GET", "/v1/twostroke/top"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/autoscale"),
    ("GET", "/v1/loads"),
    ("GET", "/version"),
    ("GET", "/tokenizer_info"),
    ("POST", "/watch/control"),
    ("POST", "/watch/plan"),
    ("GET", "/watch/plan/options"),
]


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.address}/openapi.json")


def run_examples(server: RunningServer, schema: Any, method: str, path: str, mode: GenerationMode, number: int) -> None:
    strategy = schema[path][method].as_strategy(generation_mode=mode)

    @given(case=strategy)
    @examples(number, phases=[Phase.generate], allowed=tuple(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                case.body.pop(name, None)  # valid, but two thousand tokens an example are too many
            if path.startswith("/api/"):
                case.body |= {"model": "smollm2", "options": {"num_predict": 1}}
            elif method == "POST" and path.startswith("/v1/"):
                case.body["max_output_tokens" if path.endswith("responses") else "max_tokens"] = 1
                case.body["model"] = "smollm2"
        case.call_and_validate(base_url=server.address, checks=[not_a_server_error], timeout=60)

    check()


def test_the_description_names_every_route(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert sorted((method.upper(), path) for path in paths for method in paths[path]) == sorted(ROUTES)
    chat = paths["/v1/chat/completions"]["post"]
    assert "422" not in chat["responses"] and "4XX" in chat["responses"]


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_example_gives_a_server_error(
    server: RunningServer, schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and method != "POST":
        pytest.skip("nothing to break")
    run_examples(server, schema, method, path, mode, 6)
    assert server.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), ROUTES[:9])
def test_no_example_of_many_gives_a_server_error(
    server: RunningServer, schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    run_examples(server, schema, method, path, mode, 500)
    assert server.metric("twostroke_engine_restarts_total") == 0
