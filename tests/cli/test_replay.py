"""`twostroke replay` and `twostroke demo`: a record in a few lines, and as one HTML file that asks nobody for anything;
a server that says where it is to be watched."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.cli.in_process import typed
from tests.server.running import CLIENT

from twostroke.core.errors import BadRequestError
from twostroke.web.bundle import bundle
from twostroke.web.files import INDEX, PageFile, page_files, read_files
from twostroke.web.recording import Recording

HELLO = {"t": "hello", "model": "small", "backend": "cpu", "recorded": {"date": "2026-01-02", "machine": "cpu, Linux"}}
EVENTS: list[dict[str, Any]] = [
    HELLO,
    {"t": "arrived", "r": 0, "id": "</script><script>alert(1)</script>", "at_s": 10.0, "prompt_tokens": 20},
    {"t": "step", "id": 0, "began_s": 10.0, "done_s": 10.5, "chunks": [[0, 0, 20, 20]], "slots": []},
    {"t": "step", "id": 1, "began_s": 10.5, "done_s": 10.6, "chunks": [], "slots": [[0, 21, 2, 1]]},
    {"t": "ended", "r": 0, "at_s": 10.6, "ttft_s": 0.5, "tpot_s": 0.05},
]
INDEX_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A page</title>
<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E">
<link rel="stylesheet" href="/page/page.css">
<link rel="modulepreload" href="/page/views/steps.js">
<script type="module" src="/page/main.js"></script></head><body><div id="page"></div></body></html>
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, PageFile]:
    folder = tmp_path / "static"
    (folder / "views").mkdir(parents=True)
    (folder / INDEX).write_text(INDEX_HTML)
    (folder / "page.css").write_text("body { color: black; }\n")
    (folder / "main.js").write_text('import { steps } from "./views/steps.js";\nimport"./units.js";\nsteps("<b>");\n')
    (folder / "views" / "steps.js").write_text("export * from '../units.js'\nexport const steps = () => import.meta;\n")
    (folder / "units.js").write_text('export { main } from "./main.js"; // they may go round in a circle\n')
    (folder / "unused.js").write_text("export {};\n")
    return read_files(folder)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._open = dict(attributes).get("type") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def modules_of(page: Parsed) -> dict[str, str]:
    found = json.loads(page.texts["importmap"])["imports"]
    return {name: base64.b64decode(address.partition(",")[2]).decode() for name, address in found.items()}


def test_a_replay_is_one_file_that_names_no_other(files: dict[str, PageFile]) -> None:
    text = bundle(Recording(EVENTS, 0), files)
    page = Parsed(text)
    modules = modules_of(page)
    assert set(modules) == {"page/main.js", "page/views/steps.js", "page/units.js"}
    for source in modules.values():
        for name in re.findall(r"""(?:from|import)\s*["']([^"']+)["']""", source):
            assert name in modules, "every import is one that the map has"
    assert page.texts["module"] == 'import "page/main.js";'
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(str(address).startswith("data:") for address in addresses)
    assert '"/page/' not in text


def test_what_a_record_holds_stays_data(files: dict[str, PageFile]) -> None:
    page = Parsed(bundle(Recording(EVENTS, 0), files))
    assert json.loads(page.texts["application/json"]) == EVENTS
    scripts = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert scripts == ["application/json", "importmap", "module"], "no script came out of the record"


def test_its_policy_lets_in_by_hash_what_stands_in_it_and_nothing_else(files: dict[str, PageFile]) -> None:
    page = Parsed(bundle(Recording(EVENTS, 0), files))
    [policy] = [one["content"] for tag, one in page.tags if tag == "meta" and "content" in one]
    parts = dict(part.strip().split(" ", 1) for part in str(policy).split(";"))

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"

    assert parts["script-src"] == f"{hashed(page.texts['importmap'])} {hashed(page.texts['module'])} data:"
    assert parts["style-src"] == hashed(page.texts["style"]) and parts["default-src"] == "'none'"
    assert "connect-src" not in parts and "unsafe" not in str(policy)
    first = next(index for index, (tag, _) in enumerate(page.tags) if tag in ("script", "style", "link"))
    assert any("http-equiv" in one for _, one in page.tags[:first]), "it stands before what it is about"


def test_a_page_that_lacks_a_file_is_refused_with_a_sentence(files: dict[str, PageFile]) -> None:
    for missing in ("units.js", "page.css", INDEX):
        left = {name: file for name, file in files.items() if name != missing}
        with pytest.raises(BadRequestError, match=r"no such file|has no page"):
            bundle(Recording(EVENTS, 0), left)


def test_the_packages_own_page_makes_a_replay() -> None:
    if INDEX not in page_files():
        pytest.skip("this tree has no page yet")
    page = Parsed(bundle(Recording(EVENTS, 0), page_files()))
    modules = modules_of(page)
    assert len(modules) > 10 and not any(re.search(r"""(?:from|import)\s*["']\.""", one) for one in modules.values())


def test_without_html_a_record_is_told_in_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, EVENTS)) + '\n{"t":"st')
    told = typed("replay", str(path))
    assert told.returncode == 0, told.stderr
    assert "small on cpu, Linux, 2026-01-02" in told.stdout and "0.6 s, 2 steps, 1 requests that ended" in told.stdout
    assert "TTFT: median 500.0 ms" in told.stdout and "20 tokens read; decode: 2 tokens in 1 slots" in told.stdout
    assert "1 line was not whole" in told.stdout
    refused = typed("replay", str(tmp_path / "nowhere"))
    assert refused.returncode == 2 and "cannot read the record" in refused.stderr


def test_a_records_texts_move_no_cursor(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    hello = {**HELLO, "model": "\x1b[2Jsmall\x07", "recorded": {"date": "\x1b]0;mine\x07", "machine": "\ud800\r\n"}}
    path.write_text(json.dumps(hello) + "\n")
    told = typed("replay", str(path))
    assert told.returncode == 0, told.stderr
    assert "\\x1b[2Jsmall\\x07" in told.stdout and not set(told.stdout) & set("\x1b\x07\r")


def test_a_demo_says_where_it_is_and_ends_with_ctrl_c(smollm2_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from twostroke.cli import main; main()", "demo", "--no-open"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"},
        )
    try:
        for _ in range(1200):
            if match := re.search(r"watch smollm2 at (http://127\.0\.0\.1:\d+/)", log.read_text()):
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        assert match is not None
        assert CLIENT.get(match[1]).status_code == 200
        assert CLIENT.get(f"{match[1]}watch/plan/options").json()["served"] == "smollm2"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
    finally:
        process.kill()
        process.wait()
