"""Structured output: from the fields that ask for it to the one grammar that an answer is held to, checked before the
request is queued. Knows OpenAI's names and vLLM's; compiles nothing here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.core.grammar import GrammarSpec
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.metrics import Metrics
from twostroke.server.schemas import SamplingBody
from twostroke.text.grammar_check import GrammarCheck
from twostroke.text.tokenizer import Tokenizer

ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}')

Named = tuple[str, GrammarSpec]
"""A grammar, and the field it came from."""


MAX_CHECKS = 32
"""Grammars that may wait to be checked: each may take a second. A batch that shares one waits for one check."""
RETRY_S = 2


class GrammarGate:
    """Grammars are compiled beside the event loop, one at a time; those that passed are remembered."""

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._check = GrammarCheck(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._metrics = metrics
        self._checks: dict[GrammarSpec, asyncio.Future[None]] = {}
        """The checks that are under way."""

    async def admit(self, named: Named) -> GrammarSpec:
        """The spec, if it can be followed; else a 400 that names the field, or a 429."""
        field, spec = named
        if self._check.knows(spec):
            return spec
        try:
            await asyncio.shield(self._checks.get(spec) or self._begin(spec))  # others may wait for the same
        except BadRequestError as error:
            raise bad_request(f"{field}: {error}", field) from None
        except ModelError as error:
            raise ApiError(500, str(error), code="grammar_error") from None
        return spec

    def _begin(self, spec: GrammarSpec) -> asyncio.Future[None]:
        if len(self._checks) >= MAX_CHECKS:
            self._metrics.rejected.labels("grammars").inc()
            message = f"{len(self._checks)} grammars wait to be compiled, and {MAX_CHECKS} may"
            raise ApiError(429, message, code="grammar_queue_full", headers={"Retry-After": str(RETRY_S)})
        check = asyncio.get_running_loop().run_in_executor(self._thread, self._check.check, spec)
        self._checks[spec] = check

        def on_done(done: asyncio.Future[None]) -> None:
            del self._checks[spec]
            if not done.cancelled():
                done.exception()  # seen, should nobody wait for it any more

        check.add_done_callback(on_done)
        return check

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._check.close()


def requested_grammar(body: SamplingBody) -> Named | None:
    """The grammar that a request asks for; two are refused, as one of them would be passed over."""
    found = [*_of_response_format(body.response_format), *_of_fields(body)]
    if len(found) > 1:
        raise bad_request(f"{found[0][0]} and {found[1][0]} cannot be given together", found[1][0])
    return found[0] if found else None


def _of_fields(body: SamplingBody) -> list[Named]:
    outputs = body.structured_outputs
    inner = [] if outputs is None else [outputs.json_schema, outputs.regex, outputs.choice, outputs.grammar]
    if outputs is not None and all(value is None for value in inner):
        raise bad_request("structured_outputs must hold json, regex, choice or grammar", "structured_outputs")
    names = ("json", "regex", "choice", "grammar")
    given = [(f"structured_outputs.{name}", name, value) for name, value in zip(names, inner, strict=False)]
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    given += [(f"guided_{name}", name, value) for name, value in zip(names, guided, strict=True)]
    return [(field, _spec(field, name, value)) for field, name, value in given if value is not None]


def _spec(field: str, name: str, value: str | list[str] | Mapping[str, Any]) -> GrammarSpec:
    kinds = {"json": "json_schema", "grammar": "lark"}
    text = value if isinstance(value, str) else as_json(field, value)
    return GrammarSpec(kinds.get(name, name), text)


def _of_response_format(response_format: Mapping[str, Any] | None) -> list[Named]:
    if response_format is None or (kind := response_format.get("type")) == "text":
        return []
    if kind == "json_object":
        return [object_grammar("response_format", response_format)]
    if kind != "json_schema":
        message = f"response_format.type must be text, json_object or json_schema, not {kind!r:.60}"
        raise bad_request(message, "response_format.type")
    inner = response_format.get("json_schema")
    if inner is None and response_format.get("schema") is not None:  # as llama.cpp has it
        return [schema_grammar("response_format", response_format)]
    if not isinstance(inner, dict):
        raise bad_request("response_format.json_schema must be an object with name and schema", "response_format")
    return [schema_grammar("response_format.json_schema", inner)]


def object_grammar(field: str, holder: Mapping[str, Any]) -> Named:
    """Of a format of type `json_object`; as with llama.cpp and others it may say by `schema` which object."""
    return (field, ANY_OBJECT) if holder.get("schema") is None else schema_grammar(field, holder)


def is_format_of_text(field: str) -> bool:
    """Whether this field says how a message is to look, and nothing of a tool call that comes instead."""
    return field.partition(".")[0] in ("response_format", "text", "output_config", "output_format", "format")


def schema_grammar(field: str, holder: Mapping[str, Any]) -> Named:
    """Of an object with `name`, `schema` and `strict`. A schema is always held to in full, strict or not."""
    strict = holder.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_request(f"{field}.strict must be true or false", f"{field}.strict")
    schema = holder.get("schema")
    if schema is None and not strict:
        return field, ANY_OBJECT
    if not isinstance(schema, dict):
        raise bad_request(f"{field}.schema must be a JSON schema", f"{field}.schema")
    return f"{field}.schema", GrammarSpec("json_schema", as_json(f"{field}.schema", schema))


def as_json(field: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{field} cannot be written as JSON: {error}", field) from None
