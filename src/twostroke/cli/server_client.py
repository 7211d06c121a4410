"""Asking a running server for what it knows, over HTTP, with the standard library alone."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer

from twostroke.core.errors import BackendError, BadRequestError

KEY_VARIABLE = "TWOSTROKE_API_KEY"
TIMEOUT_S = 10.0
MAX_BYTES = 32 * 2**20

Url = Annotated[str, typer.Option(help="Where the server is, or the router of a fleet.")]
ApiKey = Annotated[str | None, typer.Option(help=f"If the server asks for one; or {KEY_VARIABLE}.")]
DEFAULT_URL = "http://127.0.0.1:8000"


class AnsweredError(BadRequestError):
    """The server answered, and with an error. `code`: its own name of it; None: it has none, as routers have not."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def key_of(api_key: str | None) -> str | None:
    """The one that was given, else the environment's."""
    return api_key or os.environ.get(KEY_VARIABLE)


def base_of(url: str) -> str:
    """`url` may be the server's address or its `/v1`."""
    base = url.rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https"):
        raise BadRequestError(f"{url!r} is no address of a server: it begins with http:// or https://")
    return base


def get_json(url: str, path: str, api_key: str | None) -> dict[str, Any]:
    base, key = base_of(url), key_of(api_key)
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urlopen(Request(base + path, headers=headers), timeout=TIMEOUT_S) as response:
            answer = json.loads(response.read(MAX_BYTES))
    except HTTPError as error:
        raise _answered(error) from None
    except (URLError, OSError) as error:
        raise BackendError(f"no server answers at {base}: {getattr(error, 'reason', error)}") from None
    except ValueError:
        raise BackendError(f"what answers at {base} is no twostroke server") from None
    if not isinstance(answer, dict):
        raise BackendError(f"what answers at {base} is no twostroke server")
    return answer


def _answered(error: HTTPError) -> AnsweredError:
    """With the server's own sentence and code, where it sent one."""
    try:
        told = json.loads(error.read(MAX_BYTES))["error"]
        return AnsweredError(str(told["message"]), error.code, told.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return AnsweredError(f"the server answers {error.code} {error.reason}", error.code)
