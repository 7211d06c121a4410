"""The runner of an hour with a card, over commands that print, fail, crash and hang; and that every command which it
would start on a card is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from bench.cuda.first_run import __main__ as first_run
from bench.cuda.first_run import sections as first_sections
from bench.cuda.first_run.runner import Command, NotDone, Result, Section, run
from bench.cuda.first_run.sections import CARD, LEFT_LIMIT_S, PYTEST, SECTIONS, with_file, without_checks

ROOT = Path(__file__).parents[2]
HANG = "import time; time.sleep(600)"


def python(code: str, limit_s: float = 30.0, *, is_needed: bool = False) -> Command:
    return Command("check", (sys.executable, "-c", code), limit_s, is_needed)


def play(folder: Path, minutes: float = 1.0, **sections: Section) -> list[Result]:
    return list(run(sections, folder / "logs", minutes=minutes, environment=os.environ, folder=folder))


def has_ended(pid: int) -> bool:
    """Or is a zombie that nobody has asked for: its parent was killed, too."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return text[text.rindex(")") + 2] == "Z"


def ends_soon(pid: int) -> bool:
    limit_s = time.monotonic() + 5
    while not has_ended(pid) and time.monotonic() < limit_s:
        time.sleep(0.02)
    return has_ended(pid)


def test_what_passes_is_told_with_its_last_words(tmp_path: Path) -> None:
    (result, untimed) = play(
        tmp_path, one=[python("print('first'); print('12 passed')"), NotDone("timing", "not timed", "why")]
    )
    assert (result.section, result.state, result.detail) == ("one", "passed", "12 passed")
    assert result.log is not None and Path(result.log).read_text() == "first\n12 passed\n"
    assert (untimed.what, untimed.state, untimed.detail) == ("timing", "not timed", "why")


def test_a_failure_and_a_crash_are_told_apart_and_the_next_runs(tmp_path: Path) -> None:
    failing = python("print('FAILED test_x'); raise SystemExit(3)")
    crashing = python("import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    failed, crashed, after = play(tmp_path, a=[failing], b=[crashing], c=[python("print('fine')")])
    assert (failed.state, failed.detail, failed.tail) == ("failed", "exit status 3", ("FAILED test_x",))
    assert (crashed.state, crashed.detail, crashed.tail) == ("crashed", "by SIGSEGV", ("last words",))
    assert after.state == "passed"


def test_what_cannot_be_started_has_failed(tmp_path: Path) -> None:
    (result,) = play(tmp_path, a=[Command("check", (str(tmp_path / "nothing"),), 5.0)])
    assert result.state == "failed" and "cannot be started" in result.detail


def test_what_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """And says where it hung."""
    code = (
        "import faulthandler, subprocess, sys; faulthandler.enable();"
        f"child = subprocess.Popen([sys.executable, '-c', {HANG!r}]); print(child.pid, flush=True); child.wait()"
    )
    hung, after = play(tmp_path, hangs=[python(code, limit_s=1.5)], after=[python("print('fine')")])
    assert (hung.state, hung.detail) == ("timed out", "after 2 s") and hung.seconds < 20
    assert ends_soon(int(hung.tail[0]))
    assert any("in wait" in line for line in hung.tail)
    assert after.state == "passed"


def test_what_ignores_being_told_to_abort_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cuda.first_run.runner.LAST_WORDS_S", 0.2)
    code = f"import os, signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); print(os.getpid(), flush=True); {HANG}"
    (hung,) = play(tmp_path, hangs=[python(code, limit_s=1.0)])
    assert hung.state == "timed out" and has_ended(int(hung.tail[0]))


def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {HANG!r}]).pid)"
    (result,) = play(tmp_path, leaves=[python(code)])
    assert result.state == "passed" and ends_soon(int(result.detail))


def test_after_the_minutes_the_rest_is_not_begun(tmp_path: Path) -> None:
    sections = {"long": [python(HANG)], "rest": [python("print('fine')"), NotDone("timing", "not timed", "why")]}
    long, rest, untimed = play(tmp_path, minutes=1 / 60, **sections)
    assert (long.state, long.detail) == ("timed out", "after 1 s")
    assert (rest.state, rest.detail, rest.log) == ("not begun", "the 0.0166667 minutes are over", None)
    assert untimed.state == "not timed"


def test_without_what_is_needed_nothing_is_begun(tmp_path: Path) -> None:
    card, rest = play(tmp_path, card=[python("raise SystemExit('no card')", is_needed=True)], rest=[python("print(1)")])
    assert (card.state, card.tail) == ("failed", ("no card",))
    assert (rest.state, rest.detail) == ("not begun", "card did not pass")


def test_the_table_and_the_file_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = python("for number in range(30): print('line', number)\nraise SystemExit(1)")
    sections = {"one": [python("print('4 passed')"), NotDone("timing", "not timed", "no script")], "two": [many]}
    out = tmp_path / "made" / "told.json"
    assert first_run.run_all(sections, out, minutes=1.0) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:3] == ["one", "check", "passed"] and shown[1].endswith("4 passed")
    assert shown[2].split() == ["one", "timing", "not", "timed", "no", "script"]
    assert shown[3].split()[:3] == ["two", "check", "failed"] and shown[4] == "    | line 18"
    assert "1 passed, 1 did not" in shown[-1]
    results = json.loads(out.read_text())["results"]
    assert [(one["section"], one["state"]) for one in results] == [
        ("one", "passed"),
        ("one", "not timed"),
        ("two", "failed"),
    ]
    assert len(results[2]["tail"]) == 30 and results[2]["seconds"] > 0
    assert first_run.run_all({"one": sections["one"]}, out, minutes=1.0) == 0


def test_an_ended_run_ends_what_it_runs_and_keeps_what_it_told(tmp_path: Path) -> None:
    """The whole as a process, in which a section's command is a hanging one."""
    code = (
        "import sys; from bench.cuda.first_run import __main__ as main;"
        "from bench.cuda.first_run.runner import Command;"
        f"hang = Command('check', (sys.executable, '-c', 'import os; print(os.getpid(), flush=True); {HANG}'), 60.0);"
        "quick = Command('check', (sys.executable, '-c', 'print(1)'), 60.0);"
        "main.SECTIONS.clear(); main.SECTIONS.update(quick=[quick], hangs=[hang]);"
        "assert 'torch' not in sys.modules; main.main(['--out', sys.argv[1], '--only', 'quick,hangs'])"
    )
    out = tmp_path / "told.json"
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], cwd=ROOT, env=first_run.child_environment())
    log, limit_s = tmp_path / "told-logs" / "01-hangs-check.log", time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < limit_s:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=20) == 1
    assert ends_soon(int(log.read_text()))
    assert [one["section"] for one in json.loads(out.read_text())["results"]] == ["quick"]


@pytest.mark.parametrize("name", SECTIONS)
def test_what_it_starts_on_a_card_is_there(name: str) -> None:
    """Files of tests, words that choose among them, and scripts with their options."""
    for entry in SECTIONS[name]:
        if isinstance(entry, NotDone):
            continue
        if entry.words[: len(PYTEST)] == PYTEST:
            _, chosen, *files = entry.words[len(PYTEST) :]
            texts = [(ROOT / file).read_text() for file in files]
            word = chosen.removeprefix("(").split(")")[0].removeprefix("not ")
            assert texts and all("(" not in chosen or word in text for text in texts)
            continue
        assert entry.words[:2] == (sys.executable, "-m")
        module = import_module(entry.words[2])
        assert callable(module.main)
        options_of: Callable[[list[str]], object] | None = getattr(module, "options_of", None)
        assert options_of is not None or len(entry.words) == 3
        if options_of is not None:
            folder = getattr(options_of(list(entry.words[3:])), "folder", None)
            assert folder is None or (ROOT / folder / "config.json").is_file()


def test_a_section_says_that_it_is_not_timed() -> None:
    for name in SECTIONS.keys() - {CARD}:
        assert [entry.what for entry in SECTIONS[name]].count("timing") == 1


def test_without_pytest_timings_are_left() -> None:
    *checks, timing = without_checks(SECTIONS["drafts"], "not installed: pytest")
    assert set(checks) == {NotDone("check", "not checked", "not installed: pytest")}
    assert timing is SECTIONS["drafts"][-1]


def test_sections_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    options = first_run.options_of(["--only", "states,sinks", "--skip", "sinks"])
    assert list(first_run.chosen(options.only, options.skip)) == [CARD, "states"]
    with pytest.raises(SystemExit):
        first_run.options_of(["--only", "statess"])
    assert "there is no section statess; there are card, stored-forms" in capsys.readouterr().err
    assert first_run.main(["--list", "--only", "drafts"]) == 0
    listed = capsys.readouterr().out
    assert "bench.cuda.drafts bench/shapes/llama-3.1-8b" in listed and "sinks" not in listed


def test_checks_are_left_out_where_nobody_asks_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--list", "--only", "tiers", "--no-checks"]) == 0
    listed = capsys.readouterr().out
    assert "not checked: nobody asked for it" in listed and "pytest" not in listed
    assert "bench.kv_tiers" in listed


def test_a_file_of_the_models_weights_is_given_to_whoever_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = [entry for entry in SECTIONS["quality"] if isinstance(entry, Command)]
    after = [entry for entry in with_file(SECTIONS["quality"], "/a/file.gguf") if isinstance(entry, Command)]
    assert before and all("smollm2" in entry.words for entry in before)
    for one, other in zip(before, after, strict=True):
        assert [word for word in other.words if word not in one.words] == ["/a/file.gguf"]
        assert "smollm2" not in other.words and len(one.words) == len(other.words)
    assert first_run.main(["--list", "--only", "quality", "--smollm2", "/a/file.gguf"]) == 0
    assert capsys.readouterr().out.count("--model /a/file.gguf") == len(before)


def test_a_handoff_is_not_begun_without_the_servers_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_sections, "find_spec", lambda name: None if name in ("fastapi", "zmq") else name)
    told = first_sections.handoff()
    assert told == NotDone("timing", "not timed", "not installed: fastapi, zmq")
    monkeypatch.setattr(first_sections, "find_spec", lambda name: name)
    assert isinstance(first_sections.handoff(), Command)


def test_the_page_names_each_section_that_was_not_measured_with_its_limit() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    page = text.split("## What has not been measured on a GPU yet")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| ([\d x]+) s \|$", page, re.MULTILINE))
    assert len(rows) >= 7 and rows.keys() <= SECTIONS.keys()
    for name, limit in rows.items():
        entries = [entry for entry in SECTIONS[name] if isinstance(entry, Command) and PYTEST[2] not in entry.words]
        limits = {entry.limit_s for entry in entries} or {LEFT_LIMIT_S}  # without its packages it is no command
        count = max(1, len(entries))
        (each,) = limits
        assert limit == (f"{count} x {each:.0f}" if count > 1 else f"{each:.0f}"), name
