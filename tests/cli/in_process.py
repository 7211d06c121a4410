"""A command as a user types it, in the tests' own process: for what is refused before anything is started, and for what
only computes, where a process for each sentence would spend its time on imports. Exit codes of processes are what
`test_cli.py` is about."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

import twostroke.cli.app  # noqa: F401  # with every command, whichever is typed first
from twostroke.cli import main


def typed(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["twostroke", *arguments])
        for name, value in {"COLUMNS": "160", **environment}.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
    return subprocess.CompletedProcess(["twostroke", *arguments], code, out.getvalue(), err.getvalue())
