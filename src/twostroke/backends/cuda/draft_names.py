"""From a draft's scores to its token: the likeliest one, by the model's number for it. All who draft on a device end
each of their steps so."""

from __future__ import annotations

import torch
import triton

from twostroke.backends.cuda.kernels.head_states import name_drafts
from twostroke.backends.cuda.kernels.sampling import survey
from twostroke.backends.cuda.kernels.sampling_filters import Summaries
from twostroke.backends.cuda.kernels.sampling_state import SampledBatch
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import BLOCK, COLUMN


class DraftNames:
    def __init__(self, rows: DeviceRows, target_ids: torch.Tensor) -> None:
        """`rows`: the model's; `target_ids`: int32 [draft vocabulary], the model's token for each of the drafter's."""
        self._rows, self._target_ids = rows, target_ids
        num_blocks = triton.cdiv(len(target_ids), BLOCK)
        self._summaries = Summaries.allocate(rows.padding_row, num_blocks, target_ids.device)

    def name(self, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, step: int) -> None:
        """Writes column `step` of `drafts`, of these rows. logits [num_streams, draft vocabulary]"""
        batch = SampledBatch(logits, None, rows, self._rows.sampling.records)
        survey(batch, self._summaries, None, draws=False, block=BLOCK, column=COLUMN)
        name_drafts(self._summaries, self._target_ids, rows, drafts, step=step)
