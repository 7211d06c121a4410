"""The page's own files, who may load them, and what may be asked of the planner: over the application itself, without
an engine."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.cli.in_process import typed
from tests.server.running import RunningServer
from tests.server.watching import WatchReader
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.server import page
from twostroke.server.app import create_app
from twostroke.server.client import EngineClient
from twostroke.server.errors import CLIENT_GONE
from twostroke.server.messages import EngineSettings
from twostroke.server.metrics import Metrics
from twostroke.server.plans import Plans
from twostroke.server.run import _Server
from twostroke.server.service import Service
from twostroke.server.settings import ServerSettings
from twostroke.web.files import read_files

DATA = (
    *(("GET", "/watch"), ("POST", "/watch/control"), ("POST", "/watch/plan")),
    ("GET", "/watch/plan/options"),
)
HTML = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of three files, in place of the package's own."""
    folder = tmp_path / "static"
    (folder / "views").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>A page</title>")
    (folder / "main.js").write_text("export {};\n")
    (folder / "views" / "steps.js").write_text("export {};\n")
    (folder / "secret.key").write_text("none of the page's")
    found = read_files(folder)
    monkeypatch.setattr(page, "page_files", lambda: found)
    return folder


def asked(
    method: str, path: str, /, *, body: object = None, headers: dict[str, str] | None = None, **settings: Any
) -> httpx.Response:
    async def ask() -> httpx.Response:
        metrics = Metrics()
        client = EngineClient(EngineSettings("smollm2", EngineConfig()), metrics)
        service = Service(ServerSettings("small", **settings), client, metrics)
        transport = httpx.ASGITransport(create_app(service))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as session:
                return await session.request(method, path, json=body, headers=headers)
        finally:
            service.plans.close()

    return asyncio.run(ask())


def test_browsers_get_the_page_and_others_the_line_that_they_look_for(files: Path) -> None:
    shown = asked("GET", "/", headers=HTML)
    assert shown.status_code == 200 and "A page" in shown.text and shown.headers["content-type"].startswith("text/html")
    assert asked("GET", "/").text == "Twostroke is running" == asked("GET", "/", page="off").text
    told = asked("GET", "/", headers=HTML, page="off")
    assert told.headers["content-type"].startswith("text/plain") and "--page view" in told.text


def test_the_page_is_told_what_it_may_do_before_anything_else(files: Path) -> None:
    (files / "index.html").write_text('<!doctype html>\n<html lang="en"><title>A page</title></html>')
    found = read_files(files)
    shown = {}
    for mode in ("view", "full"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page, "page_files", lambda: found)
            shown[mode] = asked("GET", "/", headers=HTML, page=mode)
            tagged = {**HTML, "if-none-match": shown[mode].headers["etag"]}
            assert asked("GET", "/", headers=tagged, page=mode).status_code == 304
            assert asked("GET", "/", headers=tagged, page="full" if mode == "view" else "view").status_code == 200
        assert f'<html data-page="{mode}" lang="en">' in shown[mode].text


def test_a_file_says_what_it_is_and_is_not_sent_twice(files: Path) -> None:
    sent = asked("GET", "/page/views/steps.js")
    assert sent.status_code == 200 and sent.headers["content-type"] == "text/javascript; charset=utf-8"
    again = asked("GET", "/page/views/steps.js", headers={"if-none-match": sent.headers["etag"]})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == sent.headers["etag"]


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_the_page_loads_from_here_alone_and_runs_nothing_that_stands_in_it(files: Path, path: str) -> None:
    headers = asked("GET", path, headers=HTML).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/secret.key",
        "/page/nothing.js",
        "/page/../files.py",
        "/page/%2e%2e/files.py",
        "/page//etc/passwd",
    ],
)
def test_no_other_file_is_sent(files: Path, path: str) -> None:
    assert asked("GET", path).status_code == 404


def test_the_page_is_off_where_others_may_reach_it_unless_it_is_asked_for(files: Path) -> None:
    assert ServerSettings("small").page_mode == ServerSettings("small", host="localhost").page_mode == "full"
    assert ServerSettings("small", host="0.0.0.0").page_mode == ServerSettings("small", host="::").page_mode == "off"
    assert ServerSettings("small", host="0.0.0.0", page="view").page_mode == "view"
    with pytest.raises(BadRequestError, match="page must be one of off, view, full"):
        ServerSettings("small", page="some")
    for method, path in (
        ("GET", "/page/main.js"),
        ("GET", "/watch"),
        ("POST", "/watch/control"),
        ("POST", "/watch/plan"),
    ):
        body = {"viewer": "x", "paused": True} if method == "POST" else None
        refused = asked(method, path, body=body, host="0.0.0.0")
        assert refused.status_code == 404, path
    assert "--page off" in asked("GET", "/watch", page="off").json()["error"]["message"]


def test_with_keys_the_page_loads_and_its_data_needs_one(files: Path) -> None:
    keys = ("a-key",)
    assert asked("GET", "/", headers=HTML, api_keys=keys).status_code == 200
    assert asked("GET", "/page/main.js", api_keys=keys).status_code == 200
    for method, path in (
        ("GET", "/watch"),
        ("POST", "/watch/control"),
        ("POST", "/watch/plan"),
        ("GET", "/watch/plan/options"),
    ):
        assert asked(method, path, api_keys=keys).status_code == 401, path
        assert asked(method, f"{path}?key=a-key&api_key=a-key", api_keys=keys).status_code == 401, "never in a URL"
    assert asked("GET", "/", api_keys=keys, page="off").status_code == 401, "a closed server stays closed"
    known = asked("GET", "/watch", headers={"authorization": "Bearer a-key"}, api_keys=keys)
    assert known.status_code == 503 and known.json()["error"]["code"] == "engine_unavailable"


def test_a_page_of_another_site_cannot_act(files: Path) -> None:
    foreign = {"origin": "https://elsewhere.example"}
    for path in ("/watch/control", "/watch/plan"):
        assert asked("POST", path, body={"viewer": "x", "paused": True}, headers=foreign).status_code == 403
    assert asked("GET", "/", headers={"host": "elsewhere.example", **HTML}).status_code == 421
    assert asked("GET", "/watch", headers={"host": "elsewhere.example"}).status_code == 421


def test_a_viewer_with_a_key_sees_the_steps(keyed_server: RunningServer) -> None:
    with WatchReader(keyed_server.address, authorization="Bearer one") as reader:
        assert reader.hello["page"] == "full" and "one" not in reader.hello["viewer"]


# Plans


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"model": "Llama-3.1-8B"}, "Llama-3.1-8B"),
        (
            {"model": "Llama-3.1-70B", "on": "h100", "tensor_parallel": 4, "input": 3000, "output": 700, "users": 32},
            "Llama-3.1-70B --on h100 --tensor-parallel 4 --input 3000 --output 700 --users 32",
        ),
        (
            {"model": "gpt-oss-120b", "cached": 500, "kv": "fp8", "price": 2.5, "efficiency": "0.5,0.8", "users": None},
            "gpt-oss-120b --cached 500 --kv fp8 --price 2.5 --efficiency 0.5,0.8",
        ),
        (
            {"model": "Qwen3-30B-A3B", "quantise": "int4", "accept": 0.7, "drafts": 3, "on": "rtx4090"},
            "Qwen3-30B-A3B --quantise int4 --accept 0.7 --drafts 3 --on rtx4090",
        ),
        ({"model": "Llama-3.1-8B", "decode_weights": "plain"}, "Llama-3.1-8B --decode-weights plain"),
    ],
)
def test_a_plan_is_what_the_command_prints_to_the_digit(body: dict[str, object], options: str) -> None:
    answer = asked("POST", "/watch/plan", body=body)
    assert answer.status_code == 200, answer.text
    assert answer.text == typed("plan", *options.split(), "--json").stdout


def test_the_served_model_is_planned_under_its_own_name() -> None:
    answer = asked("POST", "/watch/plan", body={"model": "small"})
    assert answer.text == typed("plan", "smollm2", "--json").stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "model must be"),
        ({"model": 5}, "model must be"),
        ({"model": "GPT-9"}, "known here by name"),
        ({"model": "/etc/passwd"}, "known here by name"),
        ({"model": "../Llama-3.1-8B"}, "known here by name"),
        ({"model": "~/Llama-3.1-8B"}, "known here by name"),
        ({"model": "Llama-3.1-8B", "users": 0}, "users must be"),
        ({"model": "Llama-3.1-8B", "input": "many"}, "input must be"),
        ({"model": "Llama-3.1-8B", "input": None}, "input must be"),
        ({"model": "Llama-3.1-8B", "on": "abacus"}, "there is no device 'abacus'"),
        ({"model": "Llama-3.1-8B", "on": ["h200"]}, "on must be a text"),
        ({"model": "Llama-3.1-8B", "on": "this"}, "devices by name"),
        ({"model": "Llama-3.1-8B", "quantise": "int1"}, "int1"),
        ({"model": "Llama-3.1-8B", "wings": 2}, "no option 'wings'"),
        ({"model": "Llama-3.1-8B", "rate": 2}, "belong to --search"),
        ({"model": "Llama-3.1-8B", "drafts": 2}, "--accept"),
        ({"model": "Llama-3.1-8B", "decode_weights": "light"}, "decode_weights must be"),
        ({"model": "Llama-3.1-8B", "cached": 5000}, "cached"),
        *(
            ({"model": "Llama-3.1-8B", "efficiency": share}, "efficiency must be")
            for share in ("1e-320", "0.0009", "0", "nan", "0.5,1e-320")
        ),
        ({"model": "x" * 3000}, "at most 2000 characters"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_sentence(body: dict[str, object], said: str) -> None:
    refused = asked("POST", "/watch/plan", body=body)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text


def test_the_least_share_of_the_floor_is_planned_with() -> None:
    for share in ("0.001", "0.001,1"):
        body = {"model": "Llama-3.1-8B", "efficiency": share}
        assert asked("POST", "/watch/plan", body=body).status_code == 200


def test_the_options_are_those_of_the_command() -> None:
    options = asked("GET", "/watch/plan/options").json()
    assert options["served"] == "small" == options["models"][0] and "Llama-3.1-8B" in options["models"]
    assert {"h200", "rtx4090"} <= {one["name"].lower().replace(" ", "") for one in options["devices"]} | {
        "h200",
        "rtx4090",
    }
    assert (options["defaults"]["input"], options["defaults"]["output"], options["defaults"]["on"]) == (
        2000,
        500,
        "h200",
    )
    for kind in options["quantise"]:
        assert asked("POST", "/watch/plan", body={"model": "Llama-3.2-1B", "quantise": kind}).status_code == 200, kind


def test_plans_take_a_fifth_of_the_time_at_most_and_none_is_made_for_who_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans_s: list[tuple[float, float]] = []

    def work(self: Plans, asked: dict[str, object]) -> str:
        began_s = time.monotonic()
        time.sleep(0.02)
        spans_s.append((began_s, time.monotonic()))
        return "{}"

    async def ask() -> list[object]:
        plans = Plans("small", "smollm2")
        try:
            kept = [plans.plan({"users": number}) for number in range(6)]
            gone = [plans.plan({"users": number}, lambda: True) for number in range(10, 14)]
            return await asyncio.gather(*kept, *gone, return_exceptions=True)
        finally:
            plans.close()

    monkeypatch.setattr(Plans, "_plan", work)
    answers = asyncio.run(ask())
    assert answers[:6] == ["{}"] * 6 and len(spans_s) == 6
    assert [getattr(one, "status_code", None) for one in answers[6:]] == [CLIENT_GONE] * 4
    busy_s = sum(done_s - began_s for began_s, done_s in spans_s[:-1])
    assert busy_s <= 0.22 * (spans_s[-1][0] - spans_s[0][0])


def test_a_signal_acts_between_the_loops_turns_and_not_in_the_middle_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        metrics = Metrics()
        client = EngineClient(EngineSettings("smollm2", EngineConfig()), metrics)
        service = Service(ServerSettings("small"), client, metrics)
        server, released = _Server(uvicorn.Config(create_app(service)), service), list[str]()
        monkeypatch.setattr(service.hub.holding, "release", released.append)
        server.handle_exit(signal.SIGINT, None)
        assert not released and not service.admission.draining, "what was broken into goes on first"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert released == ["the server is stopping"] and service.admission.draining and not server.force_exit
        server.handle_exit(signal.SIGINT, None)
        assert server.force_exit and len(released) == 1
        service.plans.close()

    asyncio.run(run())
