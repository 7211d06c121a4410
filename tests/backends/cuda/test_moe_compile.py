"""What the compiler makes of the kernels for a card this machine need not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.backends.cuda.compiled_kernels import compiled_by


@pytest.mark.slow
def test_for_hopper_and_before(tmp_path: Path) -> None:
    kernels = compiled_by("compile_moe.py", tmp_path)
    assert len(kernels) == 54 + 6 * 7
    for name, found in kernels.items():
        if name.startswith("grouped"):
            assert found["bulk_copies" if "in bulk" in name else "asynchronous_copies"] > 0, name
        if name.endswith(("sm_80", "sm_89")):
            continue
        assert found["waits_for_the_kernel_before"] == 1, name
        assert found["matrix_instructions"] > 0 or not name.startswith("grouped"), name
    for name in ("gate_up", "down", "few_logits"):
        assert kernels[name]["wide_loads"] >= 8, f"{name} reads its weights in small pieces"


@pytest.mark.slow
def test_latent_attention(tmp_path: Path) -> None:
    kernels = compiled_by("compile_latent.py", tmp_path)
    assert len(kernels) == 43
    for name, found in kernels.items():
        if "sm_90" in name or "sm_" not in name:
            assert found["waits_for_the_kernel_before"] >= 1, name
        if name.startswith(("context", "chunk")) and "sm_90" in name:
            assert found["matrix_instructions"] > 0, name


@pytest.mark.slow
def test_layers_that_keep_states(tmp_path: Path) -> None:
    """Prompts by tensor cores, with tiles on their way before they are needed; states read and written in wide pieces
    by decodes and copies."""
    kernels = compiled_by("compile_states.py", tmp_path)
    assert len(kernels) == 29
    for name, found in kernels.items():
        assert found["waits_for_the_kernel_before"] == (name not in ("copy", "save")), name
        assert (found["matrix_instructions"] > 0) == name.startswith(("meet", "walk")), name
        assert (found["asynchronous_copies"] > 0) == name.startswith("walk"), name
        if name.startswith(("decode", "verify", "replay")) and "items" not in name:
            wide = 16 if name.startswith("decode") else 4
            assert found["wide_loads"] >= wide, f"{name} reads its state in small pieces"
    assert kernels["copy"]["wide_loads"] > 0 and kernels["save"]["wide_loads"] > 0


@pytest.mark.slow
def test_products_in_float8(tmp_path: Path) -> None:
    """Their numbers are on their way before they are needed, by the bulk copy engine where there is one."""
    kernels = compiled_by("compile_float8.py", tmp_path)
    assert len(kernels) == 2 * 3 * 8 + 1 + 1 + 6
    for name, found in kernels.items():
        if not name.startswith("product"):
            assert found["shared_bytes"] <= 4096 and found["reg"] < 128, name
        elif name.endswith("sm_90"):
            assert found["matrix_instructions"] > 0 and found["bulk_copies"] > 0, name
            assert found["waits_for_the_kernel_before"] == 1, name
        else:
            assert found["asynchronous_copies"] > 0, name
