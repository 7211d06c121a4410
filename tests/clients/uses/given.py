"""What a use is given (a server and a key), and how it tells what it did: parts, each by name, each may fail alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESS = os.environ["ADDRESS"]
BASE_URL = os.environ["BASE_URL"]
API_KEY = os.environ["API_KEY"]
MODEL = os.environ["MODEL"]
TOKENIZER = os.environ["TOKENIZER"]
"""A folder with the model's tokenizer, for those that count tokens themselves."""

_parts: list[dict[str, str | None]] = []


@contextmanager
def part(what: str) -> Iterator[None]:
    """One thing tried. What goes wrong in it is told at the end, and the parts after it are tried all the same."""
    error = None
    try:
        yield
    except Exception as fault:
        traceback.print_exc()
        lines = str(fault).strip().splitlines()
        error = f"{type(fault).__name__}: {lines[0]}" if lines else type(fault).__name__
    _parts.append({"what": what, "error": error})


def shell(command: str) -> str:
    """What a command line prints; it and its faults are shown to whoever looks for a cause."""
    done = subprocess.run(["sh", "-e", "-c", textwrap.dedent(command)], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    told = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 0, f"exit status {done.returncode}: {told[-1] if told else done.stdout[-200:]}"
    return done.stdout


def finish() -> None:
    """The last line of standard output is what was done."""
    print(json.dumps({"parts": _parts}), flush=True)
    sys.exit(any(entry["error"] for entry in _parts))
