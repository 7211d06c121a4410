"""Kernels compiled in threads before they are launched: once, found by the launch, errors where they are needed, and no
start that waits for what it has given up."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from triton.runtime import _async_compile

from twostroke.backends.cuda import compile_ahead, native
from twostroke.backends.cuda.compile_ahead import compilers, is_rehearsal, rehearsal
from twostroke.backends.cuda.kernels.norms import rms_norm

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "src" / "twostroke" / "backends" / "cuda" / "kernels"


def test_triton_s_kernels_are_compiled_in_threads_and_launched_behind(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.backends.cuda.compile_in_threads"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout)
    names = [name for name, _ in facts["compiled"]]
    assert sorted(names) == ["_hopper_grouped_kernel", "_mistaken", "_norm", "_norm"], "each once"
    assert all(thread.startswith("compile") for _, thread in facts["compiled"])
    in_threads = [name for name, thread in facts["launchers"] if thread.startswith("compile")]
    assert sorted(in_threads) == ["_hopper_grouped_kernel", "_norm", "_norm"]
    assert facts["launched_in_rehearsal"] == []
    assert facts["launched"] == 4 * ["_norm", "_hopper_grouped_kernel", "_norm"]
    assert "zeros([3]" in facts["mistake"]


def test_a_rehearsal_launches_nothing(device):
    x, weight, out = torch.ones(2, 16, device=device), torch.ones(16, device=device), torch.zeros(2, 16, device=device)
    with compilers() as threads:
        with rehearsal(threads):
            rms_norm(x, weight, out, eps=0.0)
            assert is_rehearsal() and not out.any()
        rms_norm(x, weight, out, eps=0.0)
    assert not is_rehearsal() and (out == 1).all()


def test_every_kernel_can_be_rehearsed():
    """One that is launched past `launcher` would run in a rehearsal, on what no kernel has written."""
    launches = re.compile(r"^ +_?[a-z]\w*\[\(.*\)\]\(", re.MULTILINE)
    assert launches.search("    _kernel[(records.shape[0],)](\n") and launches.search("    _kernel[(4, 2)](x)\n")
    assert not {path.name for path in KERNELS.parent.rglob("*.py") if launches.search(path.read_text())}


def test_other_kernels_are_compiled_once_and_errors_are_the_launch_s(monkeypatch):
    asked = []

    def compiled(source, constants):
        asked.append((source, threading.current_thread().name))
        if source == "mistake":
            raise native.NativeError("A CUDA kernel does not compile: mistake")
        return b"code"

    monkeypatch.setattr(native, "compiled", compiled)
    monkeypatch.setattr(native, "_driver", lambda: None)  # a kernel is compiled before it is loaded
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    right, wrong = (native.NativeKernel("name", source, {}) for source in ("right", "mistake"))
    with compilers() as threads:
        with rehearsal(threads):
            for kernel in (right, wrong, right, wrong):
                kernel.launch(1, 32, [], shared_bytes=0)
        threads.shutdown()
        assert sorted(source for source, _ in asked) == ["mistake", "right"]
        assert all(thread.startswith("compile") for _, thread in asked)
        with pytest.raises(native.NativeError, match="mistake"):
            wrong.launch(1, 32, [], shared_bytes=0)


def test_a_start_that_fails_does_not_wait_for_its_queue(monkeypatch):
    monkeypatch.setattr(compile_ahead, "MAX_THREADS", 2)
    begun = []

    def compile_slowly():
        begun.append(1)
        time.sleep(0.1)

    futures = []
    with pytest.raises(ValueError, match="out of memory"), compilers():
        # As Triton hands them over, and waits for them when it is left.
        mode = _async_compile.active_mode.get()
        futures += [mode.submit(number, compile_slowly, lambda _: None) for number in range(40)]
        raise ValueError("out of memory")
    assert len(begun) < 10
    assert all(future.future.done() for future in futures)
    assert _async_compile.active_mode.get() is None, "launches to come compile for themselves"
