"""Checks on a new card what the interpreter can only emulate, then times it: a section after another, each command in a
process of its own with a limit. A table as it goes, then JSON, with a log a command beside it.

    PYTHONPATH=src python -m bench.cuda.first_run --out first-run.json [--minutes 60] [--only states,sinks]"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bench.cuda.first_run.runner import WRONG, Command, Result, Section, run
from bench.cuda.first_run.sections import CARD, SECTIONS, SMOLLM2, missing_packages, with_file, without_checks

ROOT = Path(__file__).parents[3]
SHOWN_LINES = 12


def names_in(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return names


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the whole; what is not begun then is told")
    parser.add_argument("--only", type=names_in, default=list(SECTIONS), help="sections, after the question for a card")
    parser.add_argument("--skip", type=names_in, default=[], help="sections")
    parser.add_argument("--no-checks", action="store_true", help="run no tests: timings alone")
    parser.add_argument("--smollm2", default=SMOLLM2, metavar="FILE", help="its GGUF; default: fetched, or as cached")
    parser.add_argument("--list", action="store_true", help="print sections and their commands, and run none")
    parser.add_argument("--out", type=Path, help="a JSON file; logs lie in a folder beside it")
    return parser.parse_args(arguments)


def chosen(only: Sequence[str], skip: Sequence[str]) -> dict[str, Section]:
    return {name: SECTIONS[name] for name in SECTIONS if name in (CARD, *only) and name not in skip}


def child_environment() -> dict[str, str]:
    """Sources of this checkout, output that a killed process has written, and the line in which one crashed."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def row_of(section: str, what: str, state: str, seconds: str, detail: str = "") -> str:
    return f"{section:<17} {what:<12} {state:<11} {seconds:>7}  {detail}".rstrip()


def show(result: Result) -> None:
    seconds = f"{result.seconds:.1f}" if result.log else ""
    print(row_of(result.section, result.what, result.state, seconds, result.detail), flush=True)
    if result.state in WRONG:
        for line in result.tail[-SHOWN_LINES:]:
            print(f"    | {line}", flush=True)


def write(out: Path, minutes: float, results: Sequence[Result]) -> None:
    """After every command, so that what ends this process takes none of it away."""
    told = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(sys.orig_argv),
        "machine": f"{platform.node()}, Python {platform.python_version()}",
        "minutes": minutes,
        "results": [asdict(result) for result in results],
    }
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    part.replace(out)


def run_all(sections: Mapping[str, Section], out: Path, minutes: float) -> int:
    """The exit status: 0 where all that was begun passed and nothing was left over."""
    out.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    print(row_of("section", "what", "state", "seconds"), flush=True)
    logs = out.with_name(f"{out.stem}-logs")
    for result in run(sections, logs, minutes=minutes, environment=child_environment(), folder=ROOT):
        results.append(result)
        show(result)
        write(out, minutes, results)
    wrong = sum(result.state in WRONG for result in results)
    passed = sum(result.state == "passed" for result in results)
    print(f"{passed} passed, {wrong} did not; {out}, logs in {logs}")
    return int(wrong > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    sections = chosen(options.only, options.skip)
    sections = {name: with_file(section, options.smollm2) for name, section in sections.items()}
    why = "nobody asked for it" if options.no_checks else ""
    if missing := missing_packages():
        why = f"not installed: {', '.join(missing)}"
    if why:
        sections = {name: without_checks(section, why) for name, section in sections.items()}
    if options.list:
        for name, section in sections.items():
            for entry in section:
                is_command = isinstance(entry, Command)
                told = (
                    f"{entry.limit_s:.0f} s  {shlex.join(entry.words)}" if is_command else f"{entry.state}: {entry.why}"
                )
                print(f"{name:<17} {entry.what:<12} {told}")
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # gigabytes each
    for number in (signal.SIGTERM, signal.SIGHUP):  # what runs then is ended, too
        signal.signal(number, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))
    out = options.out or Path(tempfile.mkdtemp(prefix="first-run-")) / "first-run.json"
    return run_all(sections, out.resolve(), options.minutes)


if __name__ == "__main__":
    sys.exit(main())
