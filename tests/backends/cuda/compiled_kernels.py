"""What the compiler makes of kernels for cards that this machine need not have: a script compiles them in a process
of its own and tells of each in a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def compiled_by(script: str, cache: Path) -> dict[str, dict[str, Any]]:
    """By their names. None spills registers, or asks for more shared memory than there is."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).with_name(script))]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    kernels = {found["name"]: found for found in map(json.loads, told.stdout.splitlines())}
    for name, found in kernels.items():
        assert found["stack"] == 0, f"{name} spills registers"
        assert found["shared_bytes"] <= found["shared_bytes_there_are"], name
    return kernels
