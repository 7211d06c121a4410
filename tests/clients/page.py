"""`docs/clients.md`: the lines of each client's script that show it, and the table of what the tests found. The page is
written from `clients.toml`, the scripts and `results.json`, and a test holds that it is what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.declared import HERE, ROOT, Client, declared, snippet
from tests.clients.install import FOLDER

PAGE = ROOT / "docs" / "clients.md"
RESULTS = HERE / "results.json"
"""What `make test-clients` found for each client, kept with the page that shows it."""
Result = dict[str, Any]

OPENING = """# Clients

The server speaks OpenAI's API, Anthropic's and Ollama's, so what people already use works with it once it is told the
address and a key. Each section has the lines that matter. They come out of the scripts in `tests/clients/uses`, which
the tests run, with another address, another key and the model's name.

```
TWOSTROKE_API_KEYS=your-key twostroke serve smollm2
```

A server that was started without keys asks for none. Most clients insist on one all the same, and any text will do.
`smollm2` is small: it is enough to try a client, and too little for an agent's work.

## What was tried

`make test-clients` makes an environment for each client in `.clients`, starts one server on `smollm2` with a key, and
runs every script against it; `make test-clients CLIENTS=instructor,dspy` takes some. `make clients-page` writes this
page from what was found. A client that counts tokens itself is given the model's tokenizer as a local folder, where
the lines below name the one on the Hub. Each client was given what the small model can do: answers that a schema holds
it to, and calls that were required of it.

"""

CLOSING = """## Adding one

One entry in `tests/clients/clients.toml`, one script in `tests/clients/uses`, and `python -m tests.clients lock NAME`,
which writes down the versions of everything that came along. Then `make test-clients CLIENTS=NAME` and `make
clients-page`.
"""


def recorded() -> dict[str, Result]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.is_file() else {}


def result_path(client: Client) -> Path:
    """Where a run of the tests leaves what it found."""
    return FOLDER / "results" / f"{client.name}.json"


def record(clients: list[Client]) -> None:
    """Take over what the latest runs found, in the order of the declarations, and write the page anew."""
    results = recorded()
    for client in clients:
        if result_path(client).is_file():
            results[client.name] = json.loads(result_path(client).read_text(encoding="utf-8"))
    ordered = {name: results[name] for name in declared() if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    results = recorded()
    rows = ["| client | version | what was tried | result | on |", "|---|---|---|---|---|"]
    rows += [_row(client, results.get(client.name)) for client in declared().values()]
    sections = [_section(client) for client in declared().values()]
    return OPENING + "\n".join(rows) + "\n\n" + "\n".join(sections) + "\n" + CLOSING


def _row(client: Client, result: Result | None) -> str:
    name = f"[{client.name}](#{client.name})"
    if result is None:
        return f"| {name} | {client.version} | nothing yet | not tried | |"
    tried = "; ".join(part["what"] for part in result["parts"])
    return f"| {name} | {result['version']} | {tried} | {_outcome(result)} | {result['date']} |"


def _outcome(result: Result) -> str:
    failed = [part for part in result["parts"] if part["error"]]
    if not failed:
        return "works"
    return "; ".join(f"fails: {part['what']} ({_cell(part['error'])})" for part in failed)


def _cell(text: str) -> str:
    """Within a table's cell, and short."""
    text = text.replace("|", "/").replace("`", "'")
    return text if len(text) <= 160 else f"{text[:157]}..."


def _section(client: Client) -> str:
    language, lines = snippet(client)
    pins = " ".join(client.packages or client.npm)
    how = f"`{'npm install' if client.npm else 'pip install'} {pins}`" if pins else "Nothing to install"
    large = f" ({client.large})" if client.large else ""
    about = client.about[0].upper() + client.about[1:]
    return f"## {client.name}\n\n{about}. {how}{large}.\n\n```{language}\n{lines}\n```\n"
