"""`twostroke explain`: where a finished request of a running server spent its time, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from twostroke.cli import fleet_client, server_client
from twostroke.cli.explanation_view import print_explanation
from twostroke.cluster.role import Role
from twostroke.cluster.status import Told
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.explain.timeline import Span

NOT_FOUND = 404


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

    At a router's address all workers of the fleet are asked, and the one that wrote the answer explains it. With two
    pools its timeline has both machines. A server remembers its latest few hundred requests. Only the API key that sent
    a request can ask for it.
    """
    path = f"/v1/twostroke/requests/{quote(request_id, safe='')}"
    answer = _chosen(fleet_client.ask(url, path, api_key), request_id, url)
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


def _chosen(answers: list[Told], request_id: str, url: str) -> dict[str, Any]:
    """Of whoever knows the request: a worker that writes before one that read, the latest of several."""
    found = [told for told in answers if told.content is not None]
    if found:
        best = max(found, key=lambda told: (told.worker.role is not Role.PREFILL, (told.content or {}).get("ended", 0)))
        return best.content or {}
    unheard = [f"{told.worker.url} {told.trouble}" for told in answers if told.status != NOT_FOUND]
    if unheard:
        raise BackendError(f"no worker at {url} explains {request_id!r:.200}: {'; '.join(unheard)}")
    raise BadRequestError(
        f"none of the {len(answers)} workers at {url} remembers a finished request {request_id!r:.200}"
    )


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
