"""The page, the declarations and the scripts say the same; none of it needs a client or a network."""

from __future__ import annotations

import ast
import builtins
import json
import re

import pytest

from tests.clients import page
from tests.clients.declared import HERE, USES, VALUES, Client, chosen, declared, snippet
from tests.clients.install import fingerprint

CLIENTS = list(declared().values())
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


def test_the_page_is_what_the_tests_found() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "write it anew: make clients-page"


@each_client
def test_a_client_has_its_row_and_its_lines(client: Client) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| [{client.name}](#{client.name}) |")]
    assert len(rows) == 1
    assert rows[0].split("|")[2].strip() == client.version
    language, lines = snippet(client)
    assert f"## {client.name}\n" in text
    assert f"```{language}\n{lines}\n```" in text


@each_client
def test_what_was_found_is_of_the_pinned_version(client: Client) -> None:
    result = page.recorded()[client.name]
    assert result["version"] == client.version, f"try it again: make test-clients CLIENTS={client.name}"
    assert result["parts"]


@each_client
def test_about_five_lines_are_shown(client: Client) -> None:
    _, text = snippet(client)
    lines = [line for line in text.splitlines() if line.strip()]
    assert 1 <= len([line for line in lines if not re.match(r"(import|from) ", line)]) <= 6
    assert max(map(len, lines)) <= 120


@each_client
def test_the_lines_name_nothing_that_a_reader_has_not(client: Client) -> None:
    language, text = snippet(client)
    assert not re.search(rf"\b({'|'.join(VALUES)})\b(?!=)", text)
    if language == "python":
        nodes = list(ast.walk(ast.parse(text)))
        known = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        known |= {name.asname or name.name.partition(".")[0] for node in nodes for name in getattr(node, "names", [])}
        known |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
        assert {node.id for node in nodes if isinstance(node, ast.Name)} <= known


@each_client
def test_versions_are_pinned(client: Client) -> None:
    assert all(re.fullmatch(r"[\w.\[\]-]+==[\w.]+", package) for package in client.packages)
    if client.packages:
        locked = client.constraints.read_text(encoding="utf-8").lower().replace("_", "-").splitlines()
        assert all(re.sub(r"\[.*\]", "", package).lower() in locked for package in client.packages)
        assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in locked), "a name and a version, and no address"
    if client.npm:
        wanted = json.loads((client.npm_folder / "package.json").read_text(encoding="utf-8"))["dependencies"]
        assert wanted == {name: version for name, _, version in (entry.rpartition("@") for entry in client.npm)}
        packages = json.loads((client.npm_folder / "package-lock.json").read_text(encoding="utf-8"))["packages"]
        assert all("resolved" not in entry for entry in packages.values())
        assert all(packages[f"node_modules/{name}"]["version"] == version for name, version in wanted.items())


def test_nothing_is_left_over() -> None:
    assert {path for path in USES.iterdir() if path.name.startswith("use_")} == {client.use for client in CLIENTS}
    assert {path.stem for path in (HERE / "locked").iterdir()} == {client.name for client in CLIENTS if client.packages}
    assert {path.name for path in (HERE / "npm").iterdir()} == {client.name for client in CLIENTS if client.npm}
    assert list(page.recorded()) == list(declared())


def test_clients_are_chosen_by_name() -> None:
    assert [client.name for client in chosen("dspy, instructor")] == ["dspy", "instructor"]
    assert {client.name for client in CLIENTS} - {client.name for client in chosen("")} == {
        client.name for client in CLIENTS if client.large
    }
    with pytest.raises(SystemExit, match="there is no client nobody; there are raw-http"):
        chosen("nobody")


def test_another_pin_is_another_environment() -> None:
    first = declared()["openai"]
    assert fingerprint(first) != fingerprint(Client("openai", first.about, ("openai==0.0.1",)))


def test_values_stand_where_names_stood() -> None:
    _, lines = snippet(declared()["litellm"])
    assert '"openai/smollm2"' in lines and '"http://127.0.0.1:8000/v1"' in lines
    failed = {"version": "1", "date": "2026-01-01", "parts": [{"what": "chat", "error": "Error: a|b"}]}
    assert "fails: chat (Error: a/b)" in page._row(declared()["openai"], failed)


def test_no_client_fails() -> None:
    """What fails is mended before the page is written, or its part is left out and named as such."""
    assert "fails" not in page.PAGE.read_text(encoding="utf-8").partition("## raw-http")[0]
