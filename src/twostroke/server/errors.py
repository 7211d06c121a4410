"""Errors in OpenAI's shape: a message for a person, a type, the field at fault and a code. They leak nothing else.
Below the paths of another API they have that API's shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from twostroke.core.grammar import is_grammar_fault
from twostroke.server.log import log

REQUEST_ID_SCOPE = "twostroke.request_id"
"""Where in a request's scope the id is that its client gave it, or else this server."""
MAX_MESSAGE_CHARS = 1000
CLIENT_GONE = 499
"""Never sent, as nobody is there to read it."""

PROMISE_CODE = "promise_cannot_be_kept"

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {
    403: "permission_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_PATHS = "/v1/messages"
OLLAMA_PATHS = "/api/"


class ApiError(HTTPException):
    """Raised anywhere below a route. (An HTTPException, because FastAPI lets only those through its body reader.)"""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers=None if headers is None else dict(headers))
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return {"error": error_fields(self.status_code, self.message, self.param, self.code)}


def error_fields(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": _clean(message), "type": kind, "param": param and _clean(param), "code": code}


def _clean(text: str) -> str:
    """What a user sent may be quoted in it: half a surrogate pair could not be sent back."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """As clients of this path read it."""
    if path.startswith(ANTHROPIC_PATHS):
        otherwise = "invalid_request_error" if error.status_code < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.status_code, otherwise)
        return {"type": "error", "error": {"type": kind, "message": _clean(error.message)}}
    if path.startswith(OLLAMA_PATHS):
        return {"error": _clean(error.message)}
    return error.body()


def error_response(error: ApiError, path: str) -> Response:
    body = json.dumps(error_body(error, path))
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def refuse_given(body: object, reasons: Mapping[str, str]) -> None:
    """Refuse fields that would change an answer and are not supported: 400, with the field's name and the reason."""
    for name, reason in reasons.items():
        if getattr(body, name) is not None:
            raise bad_request(f"{name} is not supported: {reason}", name)


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused inside, by the names that this API has for the fields: whole ones, or parts that begin with a
    dot."""
    try:
        yield
    except ApiError as error:
        param, message = error.param, error.message
        for old, new in names.items():
            if param is not None and (param == old or old.startswith(".")):
                param = param.replace(old, new)
        if error.param is not None and param is not None and message.startswith(error.param):
            message = param + message[len(error.param) :]
        raise ApiError(error.status_code, message, param=param, code=error.code, headers=error.headers) from None


def cannot_keep_promise(message: str, retry_after_s: float) -> ApiError:
    """Its class refuses rather than to be late. What waiting would not help is the request's own fault."""
    if math.isinf(retry_after_s):
        return bad_request(message, code=PROMISE_CODE)
    headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    headers["retry-after-ms"] = str(max(1, math.ceil(retry_after_s * 1e3)))  # finer, for clients that know it
    return ApiError(429, message, code=PROMISE_CODE, headers=headers)


def engine_unavailable(reason: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, reason, code="engine_unavailable", headers={"Retry-After": str(retry_after_s)})


def failed_answer(reason: str) -> ApiError:
    """An answer that the engine could not go on with: for its grammar's sake, which is the request's own fault and
    would be met again, or for another."""
    if is_grammar_fault(reason):
        return bad_request(reason, code="grammar_error")
    return ApiError(500, reason, code="engine_error")


def server_stopping() -> ApiError:
    message = "the server was told to stop, and this answer took longer than it may wait"
    return ApiError(503, message, code="server_stopping", headers={"Retry-After": "1"})


def server_stopped() -> ApiError:
    message = "the server was told to stop at once, and waits for no answer"
    return ApiError(503, message, code="server_stopping", headers={"Retry-After": "1"})


# Handlers for FastAPI


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        message = error.detail
        if error.status_code == 404:
            message = f"there is no {request.method} {request.url.path} here"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        error = ApiError(error.status_code, message, headers=error.headers)
    return error_response(error, request.url.path)


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """The first field that pydantic minds, by its path: `messages[0].role`."""
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()), request.url.path)


def validation_error(errors: Any) -> ApiError:
    if not errors:
        return bad_request("the request is not valid")
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return bad_request(f"the body is not valid JSON: {reason}")
    # A union reports every branch, and the one that came furthest is the one that was meant. It also names branches in
    # the path, as `str` or `list[...]`: that is pydantic's word, not the user's.
    first = max((error for error in errors if error["loc"][:2] == first["loc"][:2]), key=_how_far)
    if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
        return bad_request("the body must be a JSON object")
    if first["type"] == "missing" and first["loc"] == ("body",):
        return bad_request("the body is empty: a JSON object is needed")
    parts = [part for index, part in enumerate(first["loc"]) if index or part not in ("body", "query", "path")]
    param = ""
    for part in parts:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            param += f".{part}" if param else part
    reason = "it must be an object" if first["type"] == "model_attributes_type" else str(first["msg"])
    return bad_request(f"{param or 'the body'}: {reason[:1].lower()}{reason[1:]}", param or None)


def _how_far(error: Any) -> tuple[int, int, bool]:
    """Orders complaints: a value is looked at after its type was found right, an item after those before it."""
    path = error["loc"]
    last_index = next((part for part in reversed(path) if isinstance(part, int)), -1)
    return len(path), last_index, not error["type"].endswith("_type")


async def on_bug(request: Request, error: Exception) -> Response:
    log(f"{request.method} {request.url.path!r}, request {request.scope.get(REQUEST_ID_SCOPE)}, met a bug:")
    told = ApiError(500, "something went wrong inside the server", code="internal_error")
    return error_response(told, request.url.path)
