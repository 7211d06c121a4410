"""The kernel that only reads: it must have read everything, once, in each way that measuring tries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.compiled_kernels import compiled_by

from twostroke.backends.cuda.kernels.read_memory import (
    READ_CONFIGS,
    WIDTH,
    ReadConfig,
    num_programs,
    read,
    read_configs,
)
from twostroke.backends.cuda.kernels.target import Target, target_of


@pytest.mark.parametrize("config", READ_CONFIGS, ids=str)
@pytest.mark.parametrize(("num_blocks", "programs"), [(7, 3), (2, 5), (6, 6)])
def test_programs_sums_are_torchs(config: ReadConfig, num_blocks: int, programs: int, device: str) -> None:
    if config.bulk and not target_of(device).has_bulk_copies:
        pytest.skip("this card has no bulk copy engine")
    memory = torch.randint(-1000, 1000, (num_blocks * config.rows, WIDTH), dtype=torch.int32, device=device)
    sums = torch.full((programs,), 99, dtype=torch.int32, device=device)
    read(memory, sums, config)
    stretches = [range(i * num_blocks // programs, (i + 1) * num_blocks // programs) for i in range(programs)]
    blocks = memory.view(num_blocks, -1)
    assert sums.tolist() == [int(blocks[list(own)].sum()) for own in stretches]
    assert sums.sum() == memory.sum()


def test_only_devices_with_the_engine_copy_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    from twostroke.backends.cuda.kernels import read_memory

    for capability, ways in (((8, 0), {False}), ((9, 0), {True, False}), ((12, 0), {True, False})):
        target = replace(target_of("cpu"), interpreted=False, capability=capability, num_sms=132)
        monkeypatch.setattr(read_memory, "target_of", lambda device, target=target: target)
        assert {config.bulk for config in read_configs("cpu")} == ways
        assert [num_programs(config, "cpu") for config in READ_CONFIGS] == [264, 2112, 2112, 4224]


def test_stages_are_as_many_as_shared_memory_holds() -> None:
    targets = [Target(False, (9, 0), 132, kib << 10) for kib in (227, 113, 99, 16)]
    assert [target.stages(7, 16 << 10) for target in targets] == [7, 7, 6, 1]


@pytest.mark.slow
def test_compiled_for_hopper_and_before_many_loads_are_under_way(tmp_path: Path) -> None:
    kernels = compiled_by("compile_read_memory.py", tmp_path)
    assert len(kernels) == 6
    for name, found in kernels.items():
        way = "bulk_copies" if "bulk" in name else "wide_loads" if "1 x" in name else "asynchronous_copies"
        assert found[way] >= 4, name
