"""The live page in a real browser, before a real server on SmolLM2: what it promises is what is seen."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.running import COMMAND, RunningServer

if TYPE_CHECKING:
    from tests.web.browsing import Tab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>&lt;b&gt; \x1b[31mred\x1b[0m \x1b]0;title\x07'


@pytest.fixture
def opened(running_browser: Any, page_server: tuple[RunningServer, Path]) -> Iterator[Callable[..., Tab]]:
    """Opens the page; at the end each page that was opened has printed no error and has asked nobody else."""
    from tests.web.browsing import tab

    tabs: list[Tab] = []
    with ExitStack() as stack:

        def open_tab(view: str = "steps", **options: Any) -> Tab:
            watched = stack.enter_context(tab(running_browser, page_server[0].address, **options))
            tabs.append(watched)
            watched.open(view)
            return watched

        yield open_tab
        for watched in tabs:
            watched.check()


def step_sentences(watched: Tab, most: int = 150) -> list[str]:
    """What the timeline says of each step to those who move along it by keyboard, the latest first."""
    timeline = watched.page.locator("section.view:not([hidden]) .timeline .plot")
    timeline.focus()
    sentences: list[str] = []
    for _ in range(most):
        watched.page.keyboard.press("ArrowLeft")
        sentence = timeline.get_attribute("aria-valuetext") or ""
        if sentences and sentence == sentences[-1]:
            break
        sentences.append(sentence)
    return sentences


def last_step(watched: Tab) -> str:
    """What the timeline says of the latest step that is seen."""
    timeline = watched.page.locator("section.view:not([hidden]) .timeline .plot")
    timeline.focus()
    watched.page.keyboard.press("End")
    watched.page.wait_for_timeout(200)
    return timeline.get_attribute("aria-valuetext") or ""


def ask(watched: Tab, prompt: str) -> None:
    watched.page.fill('section[aria-label="Left chat"] textarea', prompt)
    watched.page.click('section[aria-label="Left chat"] button[type=submit]')


def test_a_chat_streams(opened: Callable[..., Tab]) -> None:
    watched = opened("playground")
    ask(watched, "Tell me a story about a lighthouse and a storm.")
    said = "document.querySelector('section[aria-label=\"Left chat\"] .said')?.textContent.length ?? 0"
    lengths = set()
    done = "document.querySelector('section[aria-label=\"Left chat\"] .felt')?.textContent.includes(' out')"
    while not watched.says(done):
        lengths.add(watched.says(said))
    assert len(lengths) > 5, "the answer came in pieces"
    felt = watched.page.inner_text('section[aria-label="Left chat"] .felt')
    assert "TTFT" in felt and "TPOT" in felt and "ms" in felt


def test_a_long_prompt_is_read_between_other_streams_tokens(opened: Callable[..., Tab]) -> None:
    watched = opened("playground")
    watched.cause("long", 5)
    watched.turn_to("steps")
    mixed = [line for line in step_sentences(watched) if "prefill of" in line and "decode of 4 streams" in line]
    assert len(mixed) >= 2, "chunks of the long prompt share steps with the four streams"
    read = sum(int(line.split("prefill of ")[1].split(" ")[0].replace(",", "")) for line in mixed)
    assert read > 500


def test_the_same_prompt_again_comes_from_the_cache_and_starts_sooner(opened: Callable[..., Tab]) -> None:
    watched = opened("playground")
    watched.cause("prefix", 2)
    figures = watched.says(
        "Object.fromEntries([...document.querySelectorAll('.runs tbody tr')].map((row) => [row.dataset.run,"
        " [...row.querySelectorAll('[data-value]')].map((cell) => Number(cell.dataset.value))]))"
    )
    (first_ttft_s, _, first_cached), (again_ttft_s, _, again_cached) = figures["first time"], figures["again"]
    assert again_cached > first_cached + 200
    assert again_ttft_s < first_ttft_s / 2
    watched.turn_to("kv")
    watched.wait_until("document.querySelector('.breaks')?.textContent.includes('from the cache')")
    assert f"{int(again_cached):,} of" in watched.page.inner_text(".breaks")


def test_speculation_off_then_on_shows_drafts_that_hold(opened: Callable[..., Tab]) -> None:
    watched = opened("playground")
    watched.cause("speculation", 2)
    answers = watched.says("[...document.querySelectorAll('.runs td.answer')].map((cell) => cell.textContent)")
    assert answers[0] == answers[1], "the same tokens, sooner"
    watched.turn_to("steps")
    words = [re.search(r"(\d+) of (\d+) drafts accepted", line) for line in step_sentences(watched, most=60)]
    held = [int(found[1]) for found in words if found]
    assert sum(held) > 30 and max(held) >= 3, "several tokens a step, and most of the answer"
    assert watched.page.locator(".legend >> text=pale: drafts that were rejected").count() == 1


def test_single_stepping_reads_at_once_and_then_writes_a_token_a_click(opened: Callable[..., Tab]) -> None:
    watched = opened("steps")
    page = watched.page
    page.click("button:text-is('Hold the engine')")
    page.wait_for_selector("button:text-is('Let the engine run')")
    page.fill(".stepping input[type=text]", "Why does bread rise? Answer at length.")
    page.click("button:text-is('Send it')")
    watched.wait_until("document.querySelector('.tally')?.textContent.includes('0 of')")
    page.click("button:text-is('One step')")
    watched.wait_until("document.querySelector('.tally').dataset.tokens === '1'")
    read, of = page.inner_text(".tally").split(" read")[0].removeprefix("prefill").split(" of ")
    assert int(read) == int(of.split(" ")[0]) > 10, "the whole prompt in one step"
    for click in range(2, 6):
        page.click("button:text-is('One step')")
        watched.wait_until(f"document.querySelector('.tally').dataset.tokens === '{click}'")
        page.wait_for_timeout(300)
        assert watched.says("document.querySelector('.tally').dataset.tokens") == str(click), "and no more by itself"
    page.click("button:text-is('Let the engine run')")
    watched.wait_until("document.querySelector('.stepping .row button').textContent === 'Send it'")


def test_sliders_change_a_plan_that_agrees_with_the_command_to_the_digit(opened: Callable[..., Tab]) -> None:
    watched = opened("planner")
    page = watched.page
    shown = (
        "Object.fromEntries([...document.querySelectorAll('[data-path]')]"
        ".map((one) => [one.dataset.path, one.dataset.value]))"
    )
    page.wait_for_selector("[data-path]")
    before = watched.says(shown)
    page.focus("#plan-input")
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    page.check("[name=speculation]")
    page.select_option("[name=kv]", "fp8")
    watched.wait_until("document.querySelector('.planner [aria-busy]').getAttribute('aria-busy') === 'false'")
    after = watched.says(shown)
    assert after["alone.ttft.expected_s"] != before["alone.ttft.expected_s"]
    assert after["alone.tpot.expected_s"] != before["alone.tpot.expected_s"]
    page.click("summary:has-text('every digit')")
    command, reply = page.locator(".planner details pre").all_inner_texts()
    words = command.split()
    assert words[:2] == ["twostroke", "plan"] and "--input" in words and "--accept" in words
    said = subprocess.run([*COMMAND[:-1], *words[1:]], capture_output=True, text=True, check=True)
    plan = json.loads(said.stdout)
    assert json.loads(reply) == plan
    for path, value in after.items():
        wanted: Any = plan
        for name in path.split("."):
            wanted = wanted[name]
        assert float(value) == wanted, path


def test_what_looks_like_html_or_steers_terminals_is_text(opened: Callable[..., Tab]) -> None:
    watched = opened("playground")
    ask(watched, f"{HOSTILE} Repeat this.")
    pane = 'section[aria-label="Left chat"]'
    watched.wait_until(f"document.querySelector('{pane} .felt')?.textContent.includes(' out')")
    assert HOSTILE in (watched.page.text_content(f"{pane} .asked") or ""), "every character, and none acts"
    assert watched.says(f"document.querySelectorAll('{pane} .log img, {pane} .log script').length") == 0
    watched.turn_to("requests")
    watched.page.click("table.requests a.chip >> nth=0")
    assert HOSTILE in (watched.page.text_content(".prompt-text") or "")
    assert watched.says("document.querySelectorAll('.request-details img, .request-details script').length") == 0


def test_what_a_model_writes_is_text(opened: Callable[..., Tab]) -> None:
    watched = opened("playground")
    chunks = [{"choices": [{"index": 0, "delta": {"content": HOSTILE}}]}, {"choices": [], "usage": {}}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    watched.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    ask(watched, "Write HTML.")
    pane = 'section[aria-label="Left chat"]'
    watched.wait_until(f"document.querySelector('{pane} .said')?.textContent.includes('alert(2)')")
    assert watched.says(f"document.querySelectorAll('{pane} .log img, {pane} .log script').length") == 0


def test_texts_of_others_are_not_in_the_page(
    opened: Callable[..., Tab], page_server: tuple[RunningServer, Path]
) -> None:
    watched = opened("requests")
    latest = "(document.querySelector('table.requests a.chip')?.textContent ?? '')"
    watched.page.wait_for_timeout(1000)  # what others asked before is there
    before = watched.says(latest)
    body = {"messages": [{"role": "user", "content": "My secret word is xylophone."}], "max_tokens": 8}
    page_server[0].post("/v1/chat/completions", body, headers={"x-request-id": "someone-else"})
    watched.wait_until(f"{latest} !== {json.dumps(before)}")
    watched.page.click("table.requests a.chip >> nth=0")
    watched.wait_until("document.querySelector('.request-details code')?.textContent === 'someone-else'")
    assert "was not sent from this page" in watched.page.inner_text(".request-details")
    assert "xylophone" not in watched.page.content()


def test_a_paused_view_stands_still_and_scrubs(
    opened: Callable[..., Tab], page_server: tuple[RunningServer, Path]
) -> None:
    watched = opened("playground")
    watched.cause("prefix", 2)
    watched.turn_to("steps")
    page = watched.page
    page.click("button:text-is('Pause the view')")
    before = last_step(watched)
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
    page_server[0].post("/v1/chat/completions", body)
    page.wait_for_timeout(500)
    assert last_step(watched) == before, "the engine went on, the view did not"
    page.focus(".scrub input")
    for _ in range(3):
        page.keyboard.press("PageDown")
    assert page.inner_text(".moment").startswith("−")
    page.select_option(".pace select", "0.05")
    moment = "Number(document.querySelector('.scrub input').value)"
    held = watched.says(moment)
    page.click("button:text-is('Play')")
    page.wait_for_timeout(2000)
    assert 0 < watched.says(moment) - held < 1, "a twentieth of the time that went by"
    page.click("button:text-is('Back to now')")
    watched.wait_until("document.querySelector('.moment').textContent === 'now'")
    assert last_step(watched) != before, "what happened meanwhile is there"


def test_a_recorded_run_plays_in_the_page_and_from_one_file(
    opened: Callable[..., Tab], page_server: tuple[RunningServer, Path], running_browser: Any, tmp_path: Path
) -> None:
    from tests.web.browsing import tab

    watched = opened("playground")
    watched.cause("burst", 10)
    record = tmp_path / "run.jsonl"
    record.write_bytes(page_server[1].read_bytes()[:-7])  # torn, as by a kill
    watched.turn_to("replay")
    watched.page.set_input_files("input[type=file]", record)
    watched.page.wait_for_selector(".status.replay")
    plays(watched)
    watched.page.click("button:text-is('Back to live')")
    watched.page.wait_for_selector(".status.live")

    single = tmp_path / "run.html"
    subprocess.run([*COMMAND[:-1], "replay", str(record), "--html", str(single)], check=True, capture_output=True)
    with tab(running_browser, "file://") as alone:
        alone.page.goto(single.as_uri())
        alone.page.wait_for_selector(".status.replay")
        plays(alone)
        assert not alone.page.locator("text=Playground").count()
        alone.check()


def plays(watched: Tab) -> None:
    """From the beginning, by itself."""
    watched.wait_until("document.querySelector('.moment')?.textContent.includes(' / ')")
    first = watched.page.inner_text(".moment")
    watched.wait_until(f"document.querySelector('.moment').textContent !== '{first}'")
    watched.page.click("button:text-is('Pause the view')")
    for _ in range(3):
        watched.page.click("button[aria-label='One step on']")
    assert step_sentences(watched, most=3)[0].startswith("Step ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(opened: Callable[..., Tab], scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe  # of the extra [browser], as playwright is: no skip

    from tests.web.browsing import VIEWS

    axe = Axe()
    watched = opened("playground", scheme=scheme)
    watched.cause("prefix", 2)
    ask(watched, "Why is the sky blue?")
    for view in VIEWS:
        watched.turn_to(view)
        if view == "requests":
            watched.page.click("table.requests a.chip >> nth=0")
        if view == "planner":
            watched.page.wait_for_selector("[data-path]")
        found = axe.run(watched.page).response["violations"]
        serious = [
            (fault["id"], [node["html"][:120] for node in fault["nodes"]])
            for fault in found
            if fault["impact"] in ("serious", "critical")
        ]
        assert not serious, f"{view}: {serious}"


def test_nothing_is_wider_than_a_phone(opened: Callable[..., Tab]) -> None:
    from tests.web.browsing import PHONE, VIEWS

    watched = opened("playground", size=PHONE)
    watched.cause("burst", 10)
    for view in VIEWS:
        watched.turn_to(view)
        if view == "planner":
            watched.page.wait_for_selector("[data-path]")
        assert watched.says("document.documentElement.scrollWidth") <= PHONE[0], view


def test_dark_is_as_the_system_or_as_chosen(opened: Callable[..., Tab]) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light, dark = opened("steps").says(ground), opened("steps", scheme="dark").says(ground)
    assert light != dark
    watched = opened("steps")
    watched.page.select_option(".theme select", "dark")
    assert watched.says(ground) == dark
