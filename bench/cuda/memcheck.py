"""compute-sanitizer's memcheck over the tests of kernels, on a card: every access out of bounds or misaligned. A file a
process, many at once; a table last.

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
    "activation", "attention", "cluster_products", "decode_attention", "dependent_launch", "embedding", "flash_prefill",
    "gemv", "hopper_grouped", "hopper_prefill", "hopper_products", "logprob_tensors", "moe", "moe_routing", "norms",
    "prefill_attention", "rope", "sampling", "sampling_mask",
)  # fmt: skip
FOUND = 9
"""Exit status for what memcheck found."""


def check(sanitizer: str, path: Path, limit_s: float) -> str:
    command = [
        sanitizer, "--tool", "memcheck", "--error-exitcode", str(FOUND),
        sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow", str(path),
    ]  # fmt: skip
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
    parser.add_argument("--limit-s", type=float, default=90.0, help="for a file")
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    wanted = [part for part in options.only.split(",") if part]
    names = [name for name in KERNELS if not wanted or any(part in name for part in wanted)]
    files = [TESTS / f"test_{name}.py" for name in names]
    with ThreadPoolExecutor(options.workers) as workers:
        running = {path: workers.submit(check, sanitizer, path, options.limit_s) for path in files}
        for path, outcome in running.items():
            print(f"{path.stem:32s} {outcome.result()}", flush=True)


if __name__ == "__main__":
    main()
