"""Attention of a model on a device: which kernel runs each phase, chosen once, with the reason said. Owns the scratch
that the kernels share. Does not know layers: where keys lie and how they are scored come with each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels import flash_prefill, prefill_attention
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import cut_contexts, decode_config, plan_width, split_plan
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, PrefillKernel, Scoring
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillWork, Tiling
from twostroke.backends.cuda.kernels.target import Target, target_of

PREFILL_KERNELS: Final[Sequence[PrefillKernel]] = (flash_prefill, prefill_attention)
"""The fastest first; the last takes everything."""
INTERPRETED_SMS = 4
"""A device without multiprocessors is the interpreter: a few, so that keys are shared out there as well."""
MOST_TOGETHER = 256
"""Numbers of a head: of wider ones, the sums of several queries are more than registers hold."""
ANY_STEP = 1 << 30
"""Tokens: as many as a step may have."""


def meet_plans(cut: Callable[[torch.Tensor], None], most: int, device: torch.device) -> None:
    """Cut the contexts of as many decodes as it takes to have every kernel of that compiled. `most`: of decodes."""
    positions = torch.zeros(most, dtype=torch.int32, device=device)
    for number in {plan_width(number): number for number in range(2, most + 1)}.values():
        cut(positions[:number])


class Attention:
    """Both phases over the paged cache. Nothing here waits for the device or allocates once it is made, so every call
    may be captured in a graph; calls that run at once must not share one."""

    def __init__(
        self, shape: AttentionShape, device: torch.device | str, max_decode_tokens: int, max_queries: int = 1
    ) -> None:
        """`max_queries`: of all decodes of a step together, where they have several each; `shape.queries` of one."""
        self.shape = shape
        self.device = torch.device(device)
        target = target_of(self.device)
        self.num_sms = target.num_sms if self.device.type == "cuda" else INTERPRETED_SMS
        self._prefill_kernel, self.prefill_choice = choose_prefill(shape, target)
        if shape.head_dim > MOST_TOGETHER:
            max_decode_tokens, max_queries = max(max_decode_tokens, max_queries), 1
        self._decode_scratch = DecodeScratch(max_decode_tokens, shape, self.device, self.num_sms, max_queries)
        self._decode_items: dict[int | None, torch.Tensor] = {}
        """By window: the cuts of the step's contexts."""
        self._prefill_scratch = PrefillScratch(self.tiling(ANY_STEP), shape.head_dim, self.device)

    def prepare(self, windows: Iterable[int | None]) -> None:
        """Have every kernel of `cut_decodes` compiled: steps that are captured have only some numbers of decodes."""
        meet_plans(lambda positions: self.cut_decodes(positions, windows), self._decode_scratch.max_tokens, self.device)

    def cut_decodes(
        self,
        positions: torch.Tensor,
        windows: Iterable[int | None],
        *,
        count: torch.Tensor | None = None,
        width: int = 1,
    ) -> None:
        """Share out the keys of a step's decodes, before the first layer of each window attends. `count` (int32 [1]):
        how many of them, the first, are decodes; the others are passed over. `width`: queries of a decode, a position
        each. A decode alone needs no cuts."""
        width = self._walking_together(len(positions), width)
        shape, number = self.shape, len(positions) // width
        if number == 1:
            return
        card = target_of(self.device).name
        for window in windows:
            plan = split_plan(number, shape.kv_heads, self.num_sms, card, window=window)
            config = decode_config(shape.head_dim, number, self.device, window=window)
            if window not in self._decode_items:
                self._decode_items[window] = self._decode_scratch.new_items()
            items = self._decode_items[window]
            cut_contexts(positions, items, plan, config, window=window, count=count, queries=width)

    def decode(
        self,
        queries: torch.Tensor,  # [num_tokens, heads, head_dim]
        kv: PagedKV,
        rows: torch.Tensor,  # int32 [num_tokens]
        positions: torch.Tensor,  # int32 [num_tokens]
        out: torch.Tensor,  # [num_tokens, heads * head_dim]
        scoring: Scoring,
        width: int = 1,
    ) -> None:
        """Each token reads its row up to its own position. Its contexts were cut by `cut_decodes`, with this width."""
        width = self._walking_together(len(queries), width)
        items = None if len(queries) == width else self._decode_items[scoring.window]
        attend_decode(queries, kv, rows, positions, out, scoring, self._decode_scratch, items, width=width)

    def _walking_together(self, num_queries: int, width: int) -> int:
        """How many queries of a sequence walk over its keys together. Those of few sequences go apart, each as if it
        were a sequence: joining the parts of a walk takes one program longer than reading the keys again takes many."""
        if self.shape.head_dim > MOST_TOGETHER:
            return 1
        if width == 1 or num_queries > self._decode_scratch.max_tokens:
            return width
        return 1 if settings_for("drafts", queries=num_queries)["apart"] else width

    def tiling(self, num_tokens: int) -> Tiling:
        """How a step of `num_tokens` prompt tokens is cut into tiles."""
        return self._prefill_kernel.tiling(self.shape, num_tokens, self.num_sms)

    def prefill(
        self,
        queries: torch.Tensor,  # [num_tokens, heads, head_dim]
        kv: PagedKV,
        work: PrefillWork,
        out: torch.Tensor,  # [num_tokens, heads * head_dim]
        scoring: Scoring,
    ) -> None:
        """Each query of a chunk reads its row up to its own position, the chunk's own keys included."""
        self._prefill_kernel.attend(queries, kv, work, out, scoring, self._prefill_scratch)


def choose_prefill(shape: AttentionShape, target: Target) -> tuple[PrefillKernel, str]:
    """The first kernel that takes the model on the device, and the choice in a sentence."""
    reasons: list[str] = []
    for kernel in PREFILL_KERNELS:
        reason = kernel.declines(shape, target)
        if reason is None:
            why = f", as {'; '.join(reasons)}" if reasons else ""
            return kernel, f"prefill attention: {kernel.NAME}{why}"
        reasons.append(f"{reason} ({kernel.NAME})")
    raise ValueError(f"No kernel attends prompts: {'; '.join(reasons)}.")
