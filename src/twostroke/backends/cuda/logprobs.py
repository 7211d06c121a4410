"""placeholder until sampling's logprobs land"""

from __future__ import annotations

import torch

from twostroke.backends.cuda.batch import Batch
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.results import LogprobReader, PromptLogprobReader
from twostroke.core.step import Step


def logprob_readers(step: Step, rows: list[int], parts: Parts) -> dict[int, LogprobReader]:
    return {}


def prompt_logprob_readers(
    step: Step, batch: Batch, residual: torch.Tensor, parts: Parts
) -> dict[int, PromptLogprobReader]:
    return {}
