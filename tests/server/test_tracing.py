"""Traces, as a collector receives them: real HTTP, decoded by OpenTelemetry's own protobuf."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.server.running import running_server
from twostroke.core.errors import BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import FinishReason
from twostroke.core.timing import SequenceTiming
from twostroke.server.errors import CLIENT_GONE, ApiError
from twostroke.server.settings import traces_url
from twostroke.server.tracing import CLOSE_LIMIT_S, TRACE_SCOPE, Tracing

OPTIONS = ("smollm2", "--backend", "cpu", "--max-context", "512", "--threads", "1")


class Collector:
    """Keeps every span that is sent to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests()
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, number: int) -> list[Span]:
        end_s = time.monotonic() + 120
        while len(self.spans()) < number and time.monotonic() < end_s:
            time.sleep(0.05)
        return self.spans()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in span.attributes}


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_request_is_a_span_with_its_phases_below_it(smollm2_path: Path, tmp_path: Path, collector: Collector) -> None:
    trace_id, caller_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    secret = "Xylophonist"
    body = {
        "messages": [{"role": "user", "content": f"Who is the {secret}?"}],
        "max_tokens": 6,
        "ignore_eos": True,
        "stop": [f"{secret}-stop"],
        "cache_salt": f"{secret}-salt",
        "user": f"{secret}-user",
        "seed": -1,  # in the engine 2**64 - 1: larger than an attribute can be
        "stream": True,
    }
    options = (*OPTIONS, "--otlp-endpoint", collector.address)
    with running_server(tmp_path / "log", *options, OTEL_BSP_SCHEDULE_DELAY="50") as server:
        started_ns = time.time_ns()
        headers = {"traceparent": f"00-{trace_id}-{caller_id}-01", "X-Name": secret}
        answer = server.post("/v1/chat/completions", body, headers=headers).text
        ended_ns = time.time_ns()
        chat = collector.wait_for(4)
        refused = server.post("/v1/completions", {"prompt": secret, "max_tokens": 10**6})
        assert refused.status_code == 400 and server.get("/v1/models").status_code == 200
        two = {"prompt": [secret, "The"], "n": 2, "max_tokens": 2, "ignore_eos": True}
        assert server.post("/v1/completions", two).status_code == 200
        spans = collector.wait_for(4 + 1 + 13)
    timing = json.loads(re.findall(r"data: (\{.*\})", answer)[-1])["timing"]
    request, queue, prefill, decode = sorted(
        chat, key=lambda s: ["POST /v1/chat/completions", "queue", "prefill", "decode"].index(s.name)
    )

    assert request.kind == Span.SPAN_KIND_SERVER and request.status.code == Status.STATUS_CODE_UNSET
    assert request.trace_id.hex() == trace_id and request.parent_span_id.hex() == caller_id
    for child in (queue, prefill, decode):
        assert child.trace_id == request.trace_id and child.parent_span_id == request.span_id
    found = attributes(request)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "smollm2"
    assert found["gen_ai.response.finish_reasons"] == ["length"] and found["gen_ai.usage.output_tokens"] == 6
    prompt_tokens = timing["prefill"]["tokens"] + timing["prefill"]["cached_tokens"]
    assert found["gen_ai.usage.input_tokens"] == prompt_tokens and found["http.response.status_code"] == 200
    assert attributes(prefill)["twostroke.prefill.tokens"] == timing["prefill"]["tokens"]

    order = (started_ns, request.start_time_unix_nano, queue.start_time_unix_nano, prefill.start_time_unix_nano)
    order += (decode.start_time_unix_nano, decode.end_time_unix_nano, request.end_time_unix_nano)
    assert list(order) == sorted(order) and request.end_time_unix_nano < ended_ns + 60e9
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert seconds(queue) == pytest.approx(timing["queue_s"], abs=2e-6)
    assert seconds(prefill) == pytest.approx(timing["prefill"]["seconds"], abs=2e-6)
    assert seconds(decode) == pytest.approx(timing["decode"]["seconds"], abs=1e-3)

    by_trace = {span.trace_id: [other for other in spans if other.trace_id == span.trace_id] for span in spans}
    assert sorted(len(group) for group in by_trace.values()) == [1, 4, 13]
    (alone,) = next(group for group in by_trace.values() if len(group) == 1)
    assert attributes(alone)["http.response.status_code"] == 400 and alone.status.code == Status.STATUS_CODE_UNSET
    both = next(group for group in by_trace.values() if len(group) == 13)
    whole = attributes(next(span for span in both if span.name == "POST /v1/completions"))
    assert whole["gen_ai.response.finish_reasons"] == ["length"] * 4 and whole["gen_ai.usage.output_tokens"] == 8
    assert {attributes(span).get("twostroke.choice") for span in both} == {None, 0, 1, 2, 3}
    assert not any(secret.encode() in body for body in collector.bodies)
    names = {
        pair.key: pair.value.string_value for pair in collector.requests()[0].resource_spans[0].resource.attributes
    }
    assert names["service.name"] == "twostroke"


def test_a_collector_that_never_answers_harms_no_request(smollm2_path: Path, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
        }
        with running_server(tmp_path / "log", *OPTIONS, **settings) as server:
            for _ in range(2):
                answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
                assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
                time.sleep(0.2)
            stopping_s = time.monotonic()
        assert server.process.returncode == 0 and time.monotonic() - stopping_s < 25
        assert "Traceback" not in server.log() and server.log().count("traces:") <= 1, server.log()


# The same without a server: what only happens when things end badly.


def request_scope() -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": "/v1/completions"}


def timing_now(*, num_tokens: int) -> SequenceTiming:
    now_s = time.perf_counter()
    times_s = [now_s + 0.2 + 0.1 * index for index in range(num_tokens)]
    return SequenceTiming(now_s, now_s + 0.1, times_s, now_s + 1.0, prompt_tokens=8, cached_tokens=4)


def opened(tracing: Tracing, *request_ids: str) -> dict[str, Any]:
    scope = request_scope()
    scope[TRACE_SCOPE] = tracing.start(scope, {"traceparent": "not one"})
    tracing.submitted(scope, list(request_ids), "tiny", SamplingParams(max_tokens=4))
    return scope


def test_a_collector_that_refuses_is_said_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")  # it tries again until then
    tracing = Tracing("http://127.0.0.1:1/v1/traces")
    for _ in range(3):
        tracing.end(opened(tracing)[TRACE_SCOPE], 200)
    started_s = time.monotonic()
    tracing.close()
    assert time.monotonic() - started_s < CLOSE_LIMIT_S + 20
    shown = capfd.readouterr().err
    assert shown.count("traces:") == 1 and "Traceback" not in shown, shown


def test_a_client_that_went_away_is_told_with_what_its_request_took(collector: Collector) -> None:
    tracing = Tracing(f"{collector.address}/v1/traces")
    scope = opened(tracing, "a", "b")
    tracing.finished(TokenEvent("b", 0, (1,), "x", finish_reason=FinishReason.STOP, timing=timing_now(num_tokens=2)))
    tracing.closed(scope, ApiError(CLIENT_GONE, "the client went away"))
    tracing.end(scope[TRACE_SCOPE], 200)
    # The engine learns of it later: in the middle of reading.
    tracing.finished(TokenEvent("a", 0, (), "", finish_reason=FinishReason.ABORT, timing=timing_now(num_tokens=0)))
    tracing.close()
    spans = collector.spans()
    assert sorted(span.name for span in spans) == [
        "POST /v1/completions",
        *("decode", "prefill", "prefill"),
        *("queue", "queue"),
    ]
    request = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    found = attributes(request)
    assert found["error.type"] == "client_gone" and request.status.code == Status.STATUS_CODE_UNSET
    assert found["gen_ai.response.finish_reasons"] == ["abort", "stop"]
    assert found["gen_ai.usage.input_tokens"] == 16 and found["gen_ai.usage.cache_read.input_tokens"] == 8
    assert request.parent_span_id == b""  # what was sent as its caller's was none


def test_an_engine_that_ended_ends_every_trace(collector: Collector) -> None:
    tracing = Tracing(f"{collector.address}/v1/traces")
    scopes = [opened(tracing, name) for name in ("a", "b")]
    tracing.engine_ended()
    for scope in scopes:
        tracing.closed(scope, ApiError(503, "the engine ended", code="engine_unavailable"))
        tracing.end(scope[TRACE_SCOPE], 200)
    tracing.finished(TokenEvent("a", 0, (), "", finish_reason=FinishReason.ABORT, timing=timing_now(num_tokens=0)))
    tracing.close()
    spans = collector.spans()
    assert [attributes(span)["error.type"] for span in spans] == ["engine_unavailable"] * 2
    assert all(span.status.code == Status.STATUS_CODE_ERROR for span in spans)


@pytest.mark.parametrize(
    ("collector_url", "environment", "expected"),
    [
        (None, {}, None),
        ("http://here:4318", {}, "http://here:4318/v1/traces"),
        ("http://here:4318/v1/traces/", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there"}, "http://here:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://there/otlp"}, "https://there/otlp/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there/x"}, "http://there/x"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://here:4318", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_where_traces_go(collector_url: str | None, environment: dict[str, str], expected: str | None) -> None:
    assert traces_url(collector_url, environment) == expected


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://here", "http://", "http://here:port", "http://[half"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(BadRequestError, match="looks like http://localhost:4318"):
        traces_url(endpoint, {})


def test_nothing_is_imported_unasked_and_a_missing_extra_is_one_sentence() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"}
    parts = ("opentelemetry.sdk", "opentelemetry.exporter")  # FastAPI itself imports OpenTelemetry's bare API
    unasked = f"PARTS = {parts}; import sys, twostroke.server.run; sys.exit(any(n in sys.modules for n in PARTS))"
    assert subprocess.run([sys.executable, "-c", unasked], env=environment, timeout=60).returncode == 0
    missing = "import sys; sys.modules['opentelemetry.exporter'] = None; from twostroke.cli import main; main()"
    command = [sys.executable, "-c", missing, "serve", "no-such-model"]
    done = subprocess.run(
        [*command, "--otlp-endpoint", "http://here:1"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 2 and "pip install '.[otel]'" in done.stderr and "Traceback" not in done.stderr
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://here:1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert "warning: OpenTelemetry's variables ask for traces" in done.stderr
    assert "cannot find the model" in done.stderr  # it went on
