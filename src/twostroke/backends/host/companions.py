"""What drafters that compute are told of each pass of the model that they draft for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.scores import Scores
from twostroke.core.step import Step


@dataclass(frozen=True, slots=True)
class TargetPass:
    """One step that was computed and sampled: every drafter knows the tokens that came by now. Some of its rows may
    have left since. Rows of the batch: of each slot the row's last token and its drafts, in the step's order, then each
    chunk's tokens."""

    step: Step
    batch: Batch
    drafts: Mapping[int, tuple[int, ...]]
    """That were computed behind a slot's own token, by sequence; of some slots."""
    scores: Scores
    """With the residual streams that were asked for; valid until `follow` returns."""

    def rows(self) -> dict[int, range]:
        """Of each sequence in the step, its rows of the batch, which are those of `scores.taps`."""
        return self._placed([len(chunk.token_ids) for chunk in self.step.prefills])

    def logit_rows(self) -> dict[int, range]:
        """The same of those whose logits were computed, as rows of `scores.logits` and `scores.last_hidden`."""
        return self._placed(
            [
                len(chunk.token_ids) if chunk.prompt_logprobs is not None else int(chunk.samples)
                for chunk in self.step.prefills
            ]
        )

    def _placed(self, chunk_counts: list[int]) -> dict[int, range]:
        step, drafts = self.step, self.drafts
        counts = [1 + len(drafts.get(slot.seq_id, ())) for slot in step.decodes] + chunk_counts
        seq_ids = [slot.seq_id for slot in step.decodes] + [chunk.seq_id for chunk in step.prefills]
        ends = accumulate(counts)
        return {seq_id: range(end - count, end) for seq_id, count, end in zip(seq_ids, counts, ends, strict=True)}
