from __future__ import annotations

import pytest

from twostroke.lab.short_prompts import short_prompt_warning
from twostroke.lab.sizes import SCALES
from twostroke.lab.workloads import Batch, Nano, Noisy, Online, Prefix, Single


@pytest.mark.parametrize(
    "workload",
    [Single(prompt_len=10), Batch(prompt_len=31), Nano(least=1, most=10), Online(prompt_least=1, prompt_most=10)],
)
def test_short_prompts_are_warned_of(workload: Single) -> None:
    warning = short_prompt_warning(workload)
    assert warning is not None and warning.startswith("WARNING: ") and workload.NAME in warning


@pytest.mark.parametrize(
    "workload",
    [*SCALES["full"].values(), *SCALES["small"].values(), Prefix(shared=512, unique=10), Noisy(prompt_len=8)],
)
def test_others_are_not(workload: Single) -> None:
    assert short_prompt_warning(workload) is None
