"""OpenTelemetry traces (the extra `[otel]`): a span a generating request, and below it the queue, prefill and decode of
each sample, by the engine's own times. Imported only where traces are asked for. What a request or an answer says is
in no attribute; an exporter that fails loses spans, never requests."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke import __version__
from twostroke.server.errors import CLIENT_GONE, REQUEST_ID_SCOPE, ApiError
from twostroke.server.log import log

if TYPE_CHECKING:
    from twostroke.core.events import TokenEvent
    from twostroke.core.sampling_params import SamplingParams
    from twostroke.core.timing import SequenceTiming

OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion"),
}
"""The routes that generate, by the names that the semantic conventions have for what they do."""
TRACE_SCOPE = "twostroke.trace"
"""Where in a request's scope its RequestTrace is."""
LARGEST_INTEGER = 2**63 - 1
"""The largest that an attribute can hold; a larger one would spoil the whole batch."""
CLOSE_LIMIT_S = 3.0
COMPLAINTS_APART_S = 60.0


class RequestTrace:
    """One request's span. It is handed over once the response has ended and so has every sample: one whose client went
    away is aborted a little later."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.wall_offset_s = time.time() - time.perf_counter()
        """The engine's clock is `perf_counter`, which all processes of a machine share."""
        self.request_ids: list[str] = []
        self.num_samples = 1
        """Of each request id: choice `i` is sample `i % n` of prompt `i // n`, as in the answer."""
        self.open_samples = 0
        self.has_failed = False
        self.ended_ns: int | None = None
        self.input_tokens = self.cached_tokens = self.output_tokens = 0
        self.finish_reasons: dict[int, str] = {}

    def fail(self, kind: str) -> None:
        """The first reason stays."""
        if not self.has_failed:
            self.has_failed = True
            self.span.set_attribute("error.type", kind)
            self.span.set_status(Status(StatusCode.ERROR))

    def end_if_done(self) -> None:
        if self.ended_ns is None or self.open_samples:
            return
        if self.finish_reasons:
            self.span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": self.input_tokens,
                    "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
                    "gen_ai.usage.output_tokens": self.output_tokens,
                    "gen_ai.response.finish_reasons": [reason for _, reason in sorted(self.finish_reasons.items())],
                }
            )
        self.span.end(self.ended_ns)


class Tracing:
    def __init__(self, url: str) -> None:
        """Headers, certificates, the sampler and the rest are as the standard OTEL_ variables say."""
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        # A batch is sent by a thread of its own, from a queue that drops what it has no room for.
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._tracer = self._provider.get_tracer("twostroke", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._live: dict[str, RequestTrace] = {}
        """By the engine's request id; a request of several prompts is in it several times."""
        complaints = logging.getLogger("opentelemetry")
        complaints.addHandler(_OneLineAtATime())
        complaints.propagate = False

    def around(self, app: ASGIApp) -> ASGIApp:
        return _TracedApp(app, self)

    def start(self, scope: Scope, headers: dict[str, str]) -> RequestTrace:
        """A request arrived; it goes on with its caller's trace where it names one."""
        path, attributes = scope["path"], {"http.request.method": scope["method"], "http.route": scope["path"]}
        if request_id := scope.get(REQUEST_ID_SCOPE):
            attributes["twostroke.request_id"] = request_id
        span = self._tracer.start_span(
            f"{scope['method']} {path}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {**attributes, "gen_ai.operation.name": OPERATIONS[path], "gen_ai.provider.name": "twostroke"},
        )
        return RequestTrace(span)

    def submitted(self, scope: Scope, request_ids: list[str], model_name: str, sampling: SamplingParams) -> None:
        """The engine has it, a request id for each prompt."""
        trace: RequestTrace | None = scope.get(TRACE_SCOPE)
        if trace is None:
            return
        trace.request_ids, trace.num_samples = request_ids, sampling.n
        trace.open_samples = sampling.n * len(request_ids)
        self._live |= dict.fromkeys(request_ids, trace)
        trace.span.set_attributes(_request_attributes(model_name, sampling))

    def closed(self, scope: Scope, error: ApiError | None) -> None:
        """The call is over. An answer that was cut short has status 200 all the same: the error is said here."""
        trace: RequestTrace | None = scope.get(TRACE_SCOPE)
        if trace is None or error is None:
            return
        if error.status_code == CLIENT_GONE:
            trace.span.set_attribute("error.type", "client_gone")  # its own choice, so the status is not an error
        elif error.status_code >= 500:
            trace.fail(error.code or str(error.status_code))

    def finished(self, output: TokenEvent) -> None:
        """A sample ended, its client still there or not."""
        trace = self._live.get(output.request_id)
        if trace is None or output.finish_reason is None:
            return
        choice = trace.request_ids.index(output.request_id) * trace.num_samples + output.sample_index
        trace.finish_reasons[choice] = output.finish_reason.value
        if output.timing is not None:
            self._phases(trace, choice, output.timing)
        trace.open_samples -= 1
        if not trace.open_samples:
            self._forget(trace)
        trace.end_if_done()

    def refused(self, request_id: str) -> None:
        """Nothing will be heard of this request, nor of the others of its call, which are aborted."""
        if (trace := self._live.get(request_id)) is not None:
            self._forget(trace)
            trace.open_samples = 0
            trace.end_if_done()

    def engine_ended(self) -> None:
        """Nothing more will be heard of any."""
        for request_id in list(self._live):
            self.refused(request_id)

    def end(self, trace: RequestTrace, status: int | None) -> None:
        """The response has ended; None: before it began."""
        if status is not None:
            trace.span.set_attribute("http.response.status_code", status)
            if status >= 500:
                trace.fail(str(status))
        trace.ended_ns = time.time_ns()
        trace.end_if_done()

    def close(self) -> None:
        """Send what is left, unless that takes long."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)

    def _forget(self, trace: RequestTrace) -> None:
        for request_id in trace.request_ids:
            self._live.pop(request_id, None)

    def _phases(self, trace: RequestTrace, choice: int, timing: SequenceTiming) -> None:
        computed = timing.prompt_tokens - timing.cached_tokens
        if choice % trace.num_samples == 0:
            trace.input_tokens += timing.prompt_tokens
            trace.cached_tokens += timing.cached_tokens
        trace.output_tokens += len(timing.token_times_s)
        first_s = timing.drawn_s  # a first token that came with the request would lie before the queue
        prefill: dict[str, Any] = {
            "twostroke.prefill.tokens": computed,
            "twostroke.prefill.cached_tokens": timing.cached_tokens,
            "twostroke.prefill.chunks": timing.prefill_chunks,
        }
        decode: dict[str, Any] = {
            "twostroke.decode.tokens": len(timing.token_times_s),
            "twostroke.preemptions": timing.preemptions,
        }
        if timing.promise is not None:
            prefill["twostroke.service_level"] = decode["twostroke.service_level"] = timing.promise.level
        if timing.kept_ttft is not None:
            prefill["twostroke.promise.kept"] = timing.kept_ttft
        if timing.kept_itl is not None:
            decode["twostroke.promise.kept"] = timing.kept_itl
        if timing.tpot_s is not None:
            decode["twostroke.decode.tpot_s"] = timing.tpot_s
        for name, start_s, end_s, attributes in (
            ("queue", timing.arrival_s, timing.scheduled_s, {}),
            ("prefill", timing.scheduled_s, first_s, prefill),
            ("decode", first_s, timing.finished_s, decode),
        ):
            if start_s is None:
                break  # it ended before this phase began
            # A phase that it ended in lasted until then.
            self._child(trace, name, start_s, end_s or timing.finished_s or start_s, choice, attributes)

    def _child(
        self,
        trace: RequestTrace,
        name: str,
        start_s: float,
        end_s: float,
        choice: int,
        attributes: dict[str, Any],
    ) -> None:
        start_ns, end_ns = (int((moment_s + trace.wall_offset_s) * 1e9) for moment_s in (start_s, end_s))
        parent = set_span_in_context(trace.span)
        attributes = {"twostroke.choice": choice, **attributes}
        self._tracer.start_span(name, parent, attributes=attributes, start_time=start_ns).end(end_ns)


class _TracedApp:
    """Begins and ends a request's span. It stands behind the guard: who is not let in leaves no trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        trace = scope[TRACE_SCOPE] = self._tracing.start(scope, headers)
        status: int | None = None

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._tracing.end(trace, status)


class _OneLineAtATime(logging.Handler):
    """What the exporter complains of, in the server's own log: a line, and seldom."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + COMPLAINTS_APART_S
            log(f"traces: {' '.join(record.getMessage().split())[:300]}")


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word."""
    return Resource({SERVICE_NAME: "twostroke", SERVICE_VERSION: __version__}).merge(_named_by_environment())


def _named_by_environment() -> Resource:
    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        found = Resource({name: value for name, value in found.attributes.items() if name != SERVICE_NAME})
    return found


def _request_attributes(model_name: str, sampling: SamplingParams) -> dict[str, Any]:
    numbers: dict[str, float | None] = {
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
    }
    given = {name: value for name, value in numbers.items() if value is not None and value <= LARGEST_INTEGER}
    return {"gen_ai.request.model": model_name, "gen_ai.response.model": model_name, **given}
