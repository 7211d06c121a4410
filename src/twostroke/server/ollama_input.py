"""Ollama's requests as chat has them: messages for a chat template, options as sampling fields, formats as grammars."""

from __future__ import annotations

from typing import Any

from twostroke.core.grammar import GrammarSpec
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.handoffs import is_read_only
from twostroke.server.messages import Ready
from twostroke.server.ollama_schemas import AnswerBody, GenerateBody, Message, ModelBody, Options
from twostroke.server.schemas import ChatBody
from twostroke.server.service import Service
from twostroke.server.settings import Limits
from twostroke.server.structured import ANY_OBJECT, Named, as_json
from twostroke.text.template_variables import thinking_variables

LATEST = ":latest"
"""The tag of a name that has none."""
EFFORTS = ("low", "medium", "high")
DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P = 0.8, 40, 0.9
"""Ollama's own, which its clients count on."""
OPTION_FIELDS = {
    **{name: f"options.{name}" for name in ("stop", "speculation", "service_level")},
    "max_tokens": "options.num_predict",
}
"""From chat's names to Ollama's."""
_NEUTRAL = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
_AT_ONCE = (0, "0", "0s", "0m", "0h")


def checked_model(body: ModelBody, service: Service) -> str:
    """The model's name, as the request has it."""
    name = body.model or body.name
    if not name:
        raise bad_request("model is required", "model")
    if not any(service.settings.knows_model(known) for known in (name, name.removesuffix(LATEST))):
        message = f"model {name!r:.200} not found: this server has {service.settings.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name


def asks_to_unload(body: AnswerBody) -> bool:
    return body.keep_alive in _AT_ONCE


# Messages


def template_messages(messages: list[Message], limits: Limits) -> list[dict[str, Any]]:
    if len(messages) > limits.max_messages:
        raise bad_request(f"messages holds {len(messages)}; at most {limits.max_messages} are allowed", "messages")
    if messages[-1].role == "assistant":
        message = "messages must not end with the assistant's: an answer whose beginning is given is not continued here"
        raise bad_request(message, "messages")
    return _Turns().read(messages)


class _Turns:
    """A result names the tool, if that; templates want the id of a call. Each goes to the first call of that tool that
    has none yet."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []  # ids and names of calls without a result

    def read(self, messages: list[Message]) -> list[dict[str, Any]]:
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: Message, field: str) -> dict[str, Any]:
        if message.images:
            raise bad_request(f"{field}.images is not supported: this server's models read text", f"{field}.images")
        shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            shown["tool_calls"] = [self._call(call, f"{field}.tool_calls[{index}]") for index, call in calls]
            shown["content"] = message.content or None  # some templates know a call by its having none
        if message.role == "tool":
            shown["tool_call_id"], shown["name"] = self._answered(message)
        return shown

    def _call(self, call: dict[str, Any], field: str) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{field} must be an object with a function of name and arguments", field)
        arguments = function.get("arguments")
        if not isinstance(arguments, dict | None):
            raise bad_request(f"{field}.function.arguments must be an object", f"{field}.function.arguments")
        self._num_calls += 1
        given = call.get("id")
        call_id = given if isinstance(given, str) and given else f"call{self._num_calls:05}"  # as long as all take
        self._open.append((call_id, function["name"]))
        kept = {"name": function["name"], "arguments": arguments or {}}
        return {"id": call_id, "type": "function", "function": kept}

    def _answered(self, message: Message) -> tuple[str, str]:
        for index, (call_id, name) in enumerate(self._open):
            if message.tool_call_id in (None, call_id) and message.tool_name in (None, "", name):
                del self._open[index]
                return call_id, name
        return message.tool_call_id or "call00000", message.tool_name or ""


def generate_messages(body: GenerateBody) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


# Sampling


def as_chat(body: AnswerBody, facts: Ready, tools: list[dict[str, Any]] | None = None) -> ChatBody:
    options = body.options or Options.model_validate({})
    for name, neutral in _NEUTRAL.items():
        value = getattr(options, name)
        if value is not None and value != neutral:
            raise bad_request(f"options.{name} is not supported, unless it is {neutral}", f"options.{name}")
    if options.num_ctx is not None and options.num_ctx > facts.max_context:
        message = f"options.num_ctx is {options.num_ctx}, and this server's context is {facts.max_context} tokens"
        raise bad_request(message, "options.num_ctx")
    penalty = None if options.repeat_last_n == 0 else options.repeat_penalty
    limit = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    if is_read_only(body.kv_transfer_params):
        limit = 1  # routers say so in OpenAI's words, which are not known here
    return ChatBody.model_construct(
        max_tokens=limit,
        temperature=DEFAULT_TEMPERATURE if options.temperature is None else options.temperature,
        top_p=DEFAULT_TOP_P if options.top_p is None else options.top_p,
        top_k=DEFAULT_TOP_K if options.top_k is None else options.top_k,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,
        stop=options.stop,
        repetition_penalty=penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logprobs=body.logprobs or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs,
        tools=tools,
        speculation=options.speculation,
    )


def grammar_of(body: AnswerBody) -> Named | None:
    if not body.format:
        return None
    if isinstance(body.format, dict):
        return "format", GrammarSpec("json_schema", as_json("format", body.format))
    if body.format != "json":
        raise bad_request(f"format must be json or a JSON schema, not {body.format!r:.60}", "format")
    return "format", ANY_OBJECT


def thinking_options(body: AnswerBody, service: Service, model: str) -> dict[str, Any]:
    think = body.think
    if isinstance(think, str) and think not in EFFORTS:
        raise bad_request(f"think must be true, false, {', '.join(EFFORTS)}, not {think!r:.60}", "think")
    if think and service.reasoning_parser == "none":
        raise bad_request(f'"{model:.200}" does not support thinking', "think")
    effort = think if isinstance(think, str) else None
    return thinking_variables(
        service.template_variables, is_wanted=None if think is None else bool(think), effort=effort
    )
