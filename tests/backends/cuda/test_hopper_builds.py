import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles(tmp_path, capability):
    """Without a card: the compiler takes them all, and what makes them fast is in the code."""
    pdl = capability == "90"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    # What is not recorded, since CUDA's compiler makes it, would be launched on a card, with addresses of this host.
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.backends.cuda.hopper_builds", capability]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    builds = json.loads(done.stdout)
    alone = {"row factors", "codes", "plain prefill", "join", "dequantise"}  # at a start, or of prompts: in no chain
    chain = {"gather", "norm", "gated", "rope", "decode", "decode in float32", "mask", "drafts", "head", "fma", "dot"}
    chain |= {"decode of bytes"}
    chain |= {"quantise rows"} if pdl else set()  # float8 is for chips from 8.9 on
    assert {build["kernel"] for build in builds} == chain | alone | {"cut"}
    assert all(build["wide_loads"] for build in builds if build["kernel"] == "row factors")
    for build in builds:
        if build["kernel"] in alone:
            continue
        if build["kernel"] == "cut":  # attention reads the items before it waits, so what cuts them lets nobody begin
            assert (build["waits"], build["triggers"]) == (int(pdl), 0), build
            continue
        # The chain of dependent launches holds only if every kernel of it waits.
        exits = int(build["kernel"].startswith("decode"))  # programs without an item wait, too, before they end
        assert (build["waits"], build["triggers"]) == ((1 + exits, 1) if pdl else (0, 0)), build
        if build["kernel"] in ("dot", "decode", "decode of bytes"):
            assert build["tensor_core_products"] and build["asynchronous_copies"], build
        elif build["kernel"] == "decode in float32":  # as exact as float32 is: no tensor core
            assert build["asynchronous_copies"] and not build["tensor_core_products"], build
        elif build["kernel"] != "drafts":  # which reads a few numbers
            assert build["wide_loads"], build
    assert any(build["prefetches"] for build in builds if build["kernel"] == "decode") == pdl
