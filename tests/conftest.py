"""What tests of several rooms share, and what a worker of a parallel run needs."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys

# Before numpy and torch are imported: two threads of BLAS beside another process take longer than one alone.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and stop the process at its first instruction, which torch's 16-bit products are.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from tests.cores import keep_to_share, num_workers

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
    keep_to_share(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))

# A shell has what it runs in the background ignore Ctrl-C, and so would all that tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pathlib import Path

import pytest

from tests.properties import load_fixed_profile
from twostroke.backends.cuda import device_here
from twostroke.models.resolve import resolve

# Before anything imports Triton, as transformers does: its own functions are interpreted only if it hears of it then.
if device_here.none_found() is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

load_fixed_profile()  # before `--hypothesis-profile` is heard, and before tests are read

LONG_ROOMS = ("server", "cli", "backends", "engine")
"""Their files take longest. They come first, so that no worker still has one when the others are done."""
EXIT_LIMIT_S = 240.0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return num_workers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = [Path(__file__).parent / room for room in LONG_ROOMS]

    def place(item: pytest.Item) -> int:
        return next((i for i, folder in enumerate(folders) if item.path.is_relative_to(folder)), len(folders))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """The collector need not walk torch, transformers and all tests again and again: they stay."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """No test's limit holds from here on. A run that something left behind keeps from ending shows where it stands,
    and fails; a worker that has told its results is ended sooner, by xdist."""
    faulthandler.dump_traceback_later(EXIT_LIMIT_S, file=sys.__stderr__, exit=True)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file, from the user's cache; a fresh machine downloads it."""
    return resolve("smollm2")
