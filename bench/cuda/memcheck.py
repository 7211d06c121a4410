"""compute-sanitizer's memcheck over the tests of kernels, on a card: every access out of bounds or misaligned. A file a
process, of long ones a share of its tests, many at once; a table last.

PYTHONPATH=src python bench/cuda/memcheck.py [--only rope,moe] [--workers 14] [--limit-s 90]"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path("tests/backends/cuda")
KERNELS = (
    "activation", "attention", "cluster_products", "convolution", "decode_attention", "delta_net", "dependent_launch",
    "draft_attention", "drafts", "embedding", "flash_prefill", "gemv", "hopper_grouped", "latent_attention",
    "logprob_tensors", "low_bit_products", "mamba", "moe", "moe_routing", "mx_experts", "norms", "one_byte_kv",
    "packed_experts", "packed_products", "packed_weights", "prefill_attention", "read_memory", "rope", "sampling",
    "sampling_mask", "stored_experts", "stored_forms",
)  # fmt: skip
SHARES = {
    "flash_prefill": 2,
    "moe": 2,
    "packed_experts": 3,
    "packed_products": 8,
}
"""Processes for files that take minutes."""
LEFT_OUT = "not emulated and not it_compiles"
"""Of tests that need no card, those that take long."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-k", LEFT_OUT)
FOUND = 9
"""Exit status for what memcheck found."""


def shares_of(path: Path, count: int) -> list[list[str]]:
    """What pytest is told to run: the file, or its tests dealt out."""
    if count == 1:
        return [[str(path)]]
    command = [*PYTEST, "-o", "addopts=-q --import-mode=importlib", "--collect-only", str(path)]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    return [tests[first::count] for first in range(count) if tests[first::count]] or [[str(path)]]


def check(sanitizer: str, tests: list[str], limit_s: float) -> str:
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(FOUND), *PYTEST, "-x", *tests]
    started_s = time.perf_counter()
    # Tensors of torch's allocator lie in few large blocks, where memcheck sees no bounds: an allocation each.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired as late:
        shown = (late.stdout or b"").decode(errors="replace").splitlines()
        dots = sum(line.count(".") for line in shown if set(line) <= set(".s%[] 0123456789"))
        return f"not done in {limit_s:.0f} s, {dots} tests passed until then"
    took_s = time.perf_counter() - started_s
    errors = re.search(r"ERROR SUMMARY: (\d+) error", run.stdout)
    summary = next((line for line in reversed(run.stdout.splitlines()) if " passed" in line or "failed" in line), "")
    if run.returncode == 0:
        return f"clean, {errors.group(1) if errors else '?'} errors, {took_s:.0f} s: {summary.strip('= ')}"
    told = [
        line for line in run.stdout.splitlines() if "Invalid" in line or "=========     at" in line or "E  " in line
    ]
    return f"STATUS {run.returncode}: {summary.strip('= ')} {' | '.join(told[:4])[:300]} {run.stderr[-200:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files that have one of these in their names, by commas")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--limit-s", type=float, default=90.0, help="for a file, or a share of its tests")
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    wanted = [part for part in options.only.split(",") if part]
    names = [name for name in KERNELS if not wanted or any(part in name for part in wanted)]
    with ThreadPoolExecutor(options.workers) as workers:
        shares = workers.map(lambda name: shares_of(TESTS / f"test_{name}.py", SHARES.get(name, 1)), names)
        running = [
            (name, workers.submit(check, sanitizer, tests, options.limit_s))
            for name, dealt in zip(names, list(shares), strict=True)
            for tests in dealt
        ]
        for name, outcome in running:
            print(f"{name:20s} {outcome.result()}", flush=True)


if __name__ == "__main__":
    main()
