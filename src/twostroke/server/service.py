"""What the routes share: the engine's client, the way to it, the prompt encoder, grammars and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.requests import Request

from twostroke.core.request_check import NO_TOKENS
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.service_level import ServiceLevels
from twostroke.server.admission import KEY_SCOPE, Admission
from twostroke.server.aside import Aside
from twostroke.server.client import EngineClient
from twostroke.server.elsewhere import Elsewhere
from twostroke.server.errors import ApiError, bad_request, engine_unavailable
from twostroke.server.handoffs import Handoffs
from twostroke.server.kept import KeptRequests
from twostroke.server.levels import LevelChoice
from twostroke.server.messages import Ready
from twostroke.server.metrics import Metrics
from twostroke.server.plans import Plans
from twostroke.server.prompts import PromptEncoder
from twostroke.server.response_store import ResponseStore
from twostroke.server.settings import ServerSettings
from twostroke.server.signals import LoadCollector
from twostroke.server.structured import GrammarGate, Named
from twostroke.server.turns import Turns
from twostroke.server.vllm_metrics import VllmMetrics
from twostroke.server.watch_hub import WatchHub
from twostroke.text import reasoning, tool_parsers
from twostroke.text.template_variables import template_variables
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.known_formats import HERMES

if TYPE_CHECKING:
    from twostroke.server.tracing import Tracing


class Service:
    def __init__(
        self,
        settings: ServerSettings,
        client: EngineClient,
        metrics: Metrics,
        tracing: Tracing | None = None,
        levels: LevelChoice | None = None,
    ) -> None:
        """`levels`: which classes there are, and who may have which; None: the default alone."""
        self.settings = settings
        self._levels = levels or LevelChoice(ServiceLevels(), key_names=settings.key_names)
        self.tracing = tracing
        self.client = client
        self.metrics = metrics
        self.prompts: PromptEncoder | None = None
        """None until the tokenizer is read."""
        self.grammars: GrammarGate | None = None
        self.tool_format = HERMES
        self.reasoning_parser = "none"
        self.template_variables: frozenset[str] = frozenset()
        """The variables that the model's chat template reads."""
        self.handoffs = Handoffs(settings.role, settings.fleet_key, settings.peers, settings.router_hosts)
        self.admission = Admission(settings, client, metrics, tracing, self.handoffs)
        LoadCollector(metrics)
        if settings.vllm_metrics:
            VllmMetrics(metrics, settings.model_name)
        self.kept = KeptRequests()
        self.aside = Aside()
        self.turns = Turns()
        """For what keeps the event loop for long."""
        self.warm_up: Callable[[], object] = lambda: None
        """What takes long the first time, to be done while nobody waits."""
        self.plans = Plans(settings.model_name, client.model)
        page = settings.page_mode
        client.hub = self.hub = WatchHub(settings.model_name, "view" if page == "off" else page, metrics, client)
        self.elsewhere: Elsewhere | None = None
        """Responses that others of a fleet keep; None: it has no router that knows them."""
        self.responses = ResponseStore(settings.limits.max_stored_responses, settings.limits.max_stored_bytes)

    def new_response_id(self) -> str:
        return f"resp_{uuid4().hex}" if self.elsewhere is None else self.elsewhere.new_id()

    def read_answers_of(self, tokenizer: Tokenizer) -> None:
        """Once the tokenizer is there: how this model's answers are to be read."""
        self._choose_formats(tokenizer, "")
        self.template_variables = template_variables(tokenizer.chat_template)
        self.grammars = GrammarGate(tokenizer, self.metrics)
        self.prompts = PromptEncoder(tokenizer)

    def answers_are_read(self, family: str) -> str:
        """How, and why so, in a sentence. The family is known once the model is loaded; it decides where the tokenizer
        does not."""
        return self._choose_formats(self.encoder().tokenizer, family)

    def _choose_formats(self, tokenizer: Tokenizer, family: str) -> str:
        self.tool_format, why = tool_parsers.choose(self.settings.tool_parser, tokenizer, family)
        self.reasoning_parser, why_thoughts = reasoning.choose(self.settings.reasoning_parser, tokenizer, family)
        return f"tool calls: {self.tool_format.name}, {why}; thoughts: {self.reasoning_parser}, {why_thoughts}"

    def facts(self) -> Ready:
        if self.client.facts is None:
            raise self.client.unavailable()
        return self.client.facts

    def writing_facts(self) -> Ready:
        """The same, for whoever asks for text; raises where the model writes none."""
        facts = self.facts()
        if facts.vectors is not None:
            raise bad_request(f"{NO_TOKENS} (/v1/embeddings, /v1/rerank)", "model", "not_a_text_model")
        return facts

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
        field, spec = named[0], replace(named[1], thought=thought)
        await self.grammars.admit((field, spec.compiled))
        return replace(sampling, grammar=spec)

    def level_of(self, request: Request, wish: str | None, tier: str | None = None) -> str:
        """The class that a request is served in; a wish that cannot be had is refused."""
        return self._levels.choose(request.scope.get(KEY_SCOPE, -1), wish, tier)

    def check_model(self, name: str | None) -> None:
        if name is not None and not self.settings.knows_model(name):
            raise ApiError(
                404,
                f"there is no model {name!r:.200} here: this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
