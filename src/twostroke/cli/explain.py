"""`twostroke explain`: where a finished request of a running server spent its time, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from twostroke.cli import server_client
from twostroke.cli.explanation_view import print_explanation
from twostroke.core.errors import BackendError
from twostroke.explain.timeline import Span


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="Its answer's `id` (chatcmpl-...), or its x-request-id; default: the latest."
        ),
    ] = "last",
    url: server_client.Url = server_client.DEFAULT_URL,
    api_key: server_client.ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server says, as JSON.")] = False,
) -> None:
    """Explain one finished request of a running server: slow to start or slow to stream, why, and what would help.

    The server remembers its latest few hundred requests, for the API key that sent them and no other.
    """
    answer = server_client.get_json(url, f"/v1/twostroke/requests/{quote(request_id, safe='')}", api_key)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    console = Console(highlight=False, markup=False)
    try:
        choices = answer["choices"]
        for choice in choices:
            name = f"{answer['id']}, choice {choice['index']}" if len(choices) > 1 else str(answer["id"])
            console.print(f"{name} ({choice['finish_reason']})", style="dim")
            _print_choice(console, choice)
    except (KeyError, TypeError) as error:
        raise BackendError(f"the server's explanation could not be read: {error!r}") from None


def _print_choice(console: Console, choice: dict[str, Any]) -> None:
    print_explanation(
        console,
        choice["timing"]["verdict"],
        choice["start"],
        choice["stream"],
        [Span(**span) for span in choice["timeline"]],
        is_fitted=choice["predicted_by"] == "step_cost",
        doubt=choice.get("doubt"),
        promise=choice["timing"].get("promise"),
        handoff=(choice["timing"].get("handoff") or {}).get("sentence"),
    )
