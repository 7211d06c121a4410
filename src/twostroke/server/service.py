"""What the routes share: the engine's client, the prompt encoder, limits and counts. Opening a call is where a request
is let in or turned away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from twostroke.core.sampling_params import SamplingParams
from twostroke.server.calls import Call
from twostroke.server.client import EngineClient
from twostroke.server.errors import CLIENT_GONE, ApiError, bad_request, engine_unavailable
from twostroke.server.kept import KeptRequests
from twostroke.server.messages import Ready
from twostroke.server.metrics import Metrics
from twostroke.server.prompts import PromptEncoder
from twostroke.server.settings import ServerSettings
from twostroke.server.structured import GrammarGate, Named
from twostroke.text import reasoning, tool_parsers
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers import HERMES

if TYPE_CHECKING:
    from twostroke.server.tracing import Tracing

KEY_SCOPE = "twostroke.key"
"""Where in a request's scope the number of its API key is."""
RECEIVED_SCOPE = "twostroke.received_s"
"""And when it came in, on the engine's clock."""
LONGEST_RETRY_S = 60


class Service:
    def __init__(
        self, settings: ServerSettings, client: EngineClient, metrics: Metrics, tracing: Tracing | None = None
    ) -> None:
        self.settings = settings
        self.tracing = tracing
        self.client = client
        self.metrics = metrics
        self.prompts: PromptEncoder | None = None
        """None until the tokenizer is read."""
        self.grammars: GrammarGate | None = None
        self.tool_format = HERMES
        self.reasoning_parser = "none"
        self.draining = False
        self.kept = KeptRequests()
        self._in_flight_by_key: Counter[int] = Counter()

    def read_answers_of(self, tokenizer: Tokenizer) -> None:
        """Once the tokenizer is there: how this model's answers are to be read."""
        self.tool_format = tool_parsers.choose(self.settings.tool_parser, tokenizer)
        self.reasoning_parser = reasoning.choose(self.settings.reasoning_parser, tokenizer)
        self.grammars = GrammarGate(tokenizer)
        self.prompts = PromptEncoder(tokenizer)

    def facts(self) -> Ready:
        if self.client.facts is None:
            raise self.client.unavailable()
        return self.client.facts

    def encoder(self) -> PromptEncoder:
        if self.prompts is None:
            raise engine_unavailable("the server is still starting")
        return self.prompts

    async def constrained(self, sampling: SamplingParams, named: Named | None, thought: str = "none") -> SamplingParams:
        """The same, held to a grammar that was found sound; `thought` is what may come before it."""
        if named is None:
            return sampling
        if sampling.ignore_eos:
            raise bad_request(f"ignore_eos does not go with {named[0]}: its answer ends where it is complete", named[0])
        if self.grammars is None:
            raise engine_unavailable("the server is still starting")
        return replace(sampling, grammar=replace(await self.grammars.admit(named), thought=thought))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r:.200} here: this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def open_call(
        self,
        request: Request,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> Call:
        """Whoever opens a call closes it, or hands it to an EventStream."""
        key = request.scope.get(KEY_SCOPE, -1)
        self._admit(key, len(prompts))
        inbox = self.client.submit(prompts, sampling, priority=priority or 0, cache_salt=cache_salt or "")
        self._in_flight_by_key[key] += 1
        if self.tracing is not None:
            self.tracing.submitted(request.scope, inbox.unfinished, self.settings.model_name, sampling)

        def on_close(error: ApiError | None) -> None:
            self._in_flight_by_key[key] -= 1
            if error is not None and error.status_code == CLIENT_GONE:
                self.metrics.disconnects.inc()
            if self.tracing is not None:
                self.tracing.closed(request.scope, error)

        return Call(inbox, request.receive, self.settings.limits.request_timeout_s, on_close)

    def _admit(self, key: int, num_prompts: int) -> None:
        limits, waiting = self.settings.limits, self.client.num_waiting
        if self.draining:
            raise engine_unavailable("the server is stopping")
        if key >= 0 and limits.max_per_key is not None and self._in_flight_by_key[key] >= limits.max_per_key:
            self.metrics.rejected.labels("per_key").inc()
            raise ApiError(
                429,
                f"this API key has {self._in_flight_by_key[key]} requests in flight, "
                f"and {limits.max_per_key} are allowed",
                code="concurrency_limit",
                headers={"Retry-After": "1"},
            )
        if waiting and waiting + num_prompts > limits.max_queue:
            self.metrics.rejected.labels("queue_full").inc()
            retry_s = self.metrics.mean_request_s * waiting / max(1, self.facts().max_running)
            raise ApiError(
                429,
                f"the queue is full: {waiting} requests wait, and {limits.max_queue} may",
                code="queue_full",
                headers={"Retry-After": str(min(LONGEST_RETRY_S, max(1, math.ceil(retry_s))))},
            )


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
