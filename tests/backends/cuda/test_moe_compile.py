"""What the compiler makes of the kernels for a card this machine need not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_moe.py")


@pytest.mark.slow
def test_for_hopper_and_before(tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    told = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, check=True)
    kernels = {found["name"]: found for found in map(json.loads, told.stdout.splitlines())}
    assert len(kernels) == 44
    for name, found in kernels.items():
        assert found["stack"] == 0, f"{name} spills registers"
        assert found["shared_bytes"] <= found["shared_bytes_there_are"], name
        if name.startswith("grouped"):
            assert found["bulk_copies" if "in bulk" in name else "asynchronous_copies"] > 0, name
        if name.endswith(("sm_80", "sm_89")):
            continue
        assert found["waits_for_the_kernel_before"] == 1, name
        assert found["matrix_instructions"] > 0 or not name.startswith("grouped"), name
    for name in ("gate_up", "down", "few_logits"):
        assert kernels[name]["wide_loads"] >= 8, f"{name} reads its weights in small pieces"
