"""Attention of a model on a device: which kernel runs each phase, chosen once, with the reason said. Owns the scratch
that the kernels share. Does not know layers: window and soft cap come with each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels import flash_prefill
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import cut_contexts, plan_width
from twostroke.backends.cuda.kernels.prefill_attention import attend_prefill, tile_rows_for
from twostroke.backends.cuda.kernels.prefill_tiles import (
    PrefillScratch,
    PrefillTiles,
    PrefillWork,
    unsupported_on_hopper,
)

SMALLEST_TILE, LARGEST_TILE = 64, 128
INTERPRETED_SMS = 4
"""A device without multiprocessors is the interpreter: a few, so that keys are shared out there as well."""


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its KV layout the kernels depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Attention:
    """Both phases over the paged cache. Nothing here waits for the device or allocates once it is made, so every call
    may be captured in a graph; calls that run at once must not share one."""

    def __init__(self, shape: AttentionShape, device: torch.device | str, max_decode_tokens: int) -> None:
        self.shape = shape
        self.device = torch.device(device)
        on_card = self.device.type == "cuda"
        self.num_sms = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if on_card else INTERPRETED_SMS
        )
        capability = torch.cuda.get_device_capability(self.device) if on_card else None
        self._hopper_prefill, self.prefill_choice = _hopper_or_reason(shape, capability)
        largest_tile = tile_rows_for(1 << 30, shape.group, shape.head_dim)
        self._decode_scratch = DecodeScratch(
            max_decode_tokens, shape.heads, shape.kv_heads, shape.head_dim, self.device, self.num_sms
        )
        self._decode_items: dict[int | None, torch.Tensor] = {}
        """By window: the cuts of the step's contexts."""
        self._prefill_scratch = PrefillScratch(
            shape.kv_heads, shape.head_dim, self.device, self.num_sms, tile_rows=largest_tile
        )

    def prepare(self, windows: Iterable[int | None]) -> None:
        """Have every kernel of `cut_decodes` compiled: steps that are captured have only some numbers of decodes."""
        most = self._decode_scratch.max_tokens
        positions = torch.zeros(most, dtype=torch.int32, device=self.device)
        for number in {plan_width(number): number for number in range(1, most + 1)}.values():
            self.cut_decodes(positions[:number], windows)

    def cut_decodes(
        self,
        positions: torch.Tensor,
        windows: Iterable[int | None],
        *,
        count: torch.Tensor | None = None,
    ) -> None:
        """Share out the keys of a step's decodes, before the first layer of each window attends. `count` (int32 [1]):
        how many of the positions, the first, are decodes; the others are passed over."""
        shape = self.shape
        for window in windows:
            if window not in self._decode_items:
                self._decode_items[window] = self._decode_scratch.new_items()
            cut_contexts(
                positions, self._decode_items[window],
                kv_heads=shape.kv_heads, head_dim=shape.head_dim, num_sms=self.num_sms,
                window=window, count=count,
            )  # fmt: skip

    def decode(
        self,
        queries: torch.Tensor,  # [num_tokens, heads, head_dim]
        k_cache: torch.Tensor,  # [num_blocks + 1, kv_heads, block_size, head_dim]
        v_cache: torch.Tensor,
        table: torch.Tensor,  # int32 [num_rows, table_len]
        rows: torch.Tensor,  # int32 [num_tokens]
        positions: torch.Tensor,  # int32 [num_tokens]
        out: torch.Tensor,  # [num_tokens, heads * head_dim]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Each token reads its row up to its own position. Its contexts were cut by `cut_decodes`."""
        attend_decode(
            queries, k_cache, v_cache, table, rows, positions, out,
            scale=scale, window=window, softcap=softcap, scratch=self._decode_scratch,
            items=self._decode_items[window],
        )  # fmt: skip

    def tiles(
        self,
        first_tokens: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        rows: Sequence[int],
        *,
        window: int | None = None,
        tile_rows: int | None = None,
        pad_items: int | None = None,
    ) -> PrefillTiles:
        """The work of a step's prefill chunks, once a step for all layers; a captured graph fixes the last two."""
        shape = self.shape
        return PrefillTiles.build(
            first_tokens, counts, starts, rows,
            tile_rows=tile_rows or self.tile_rows(sum(counts)),
            group=shape.group, kv_heads=shape.kv_heads, num_sms=self.num_sms, window=window, pad_items=pad_items,
        )  # fmt: skip

    def tile_rows(self, num_tokens: int) -> int:
        """The height of tiles for a step of so many prompt tokens: low ones, unless high ones still fill the device."""
        rows = num_tokens * self.shape.heads
        if rows < 2 * LARGEST_TILE * self.num_sms:
            return SMALLEST_TILE
        return tile_rows_for(num_tokens, self.shape.group, self.shape.head_dim)

    def capacity(self, num_tokens: int, num_segments: int, tile_rows: int) -> int:
        """Items that are always enough for so many tokens in so many chunks: what a captured graph has room for."""
        shape = self.shape
        return PrefillTiles.capacity(
            num_tokens, num_segments,
            tile_rows=tile_rows, group=shape.group, kv_heads=shape.kv_heads, num_sms=self.num_sms,
        )  # fmt: skip

    @property
    def max_part_items(self) -> int:
        """Items that can be parts of tiles, at most: what a captured graph joins."""
        return self._prefill_scratch.max_items

    def prefill(
        self,
        queries: torch.Tensor,  # [num_tokens, heads, head_dim]
        k_cache: torch.Tensor,  # [num_blocks + 1, kv_heads, block_size, head_dim]
        v_cache: torch.Tensor,
        table: torch.Tensor,  # int32 [num_rows, table_len]
        work: PrefillWork,
        out: torch.Tensor,  # [num_tokens, heads * head_dim]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Each query of a chunk reads its row up to its own position, the chunk's own keys included."""
        if window is not None and work.longest_context <= window:
            window = None
        if self._hopper_prefill is not None and window is None and softcap is None:
            self._hopper_prefill(
                queries, k_cache, v_cache, table, work, out, scale=scale, scratch=self._prefill_scratch
            )
        else:
            attend_prefill(
                queries, k_cache, v_cache, table, work, out,
                scale=scale, window=window, softcap=softcap, scratch=self._prefill_scratch,
            )  # fmt: skip


def _hopper_or_reason(
    shape: AttentionShape, capability: tuple[int, int] | None
) -> tuple[Callable[..., None] | None, str]:
    """The Hopper kernel where it can run, and the choice in a sentence."""
    try:
        from twostroke.backends.cuda.kernels.hopper_prefill import attend_prefill_hopper
    except ImportError as error:  # Gluon is experimental in Triton: a release may move what the kernel needs
        return None, f"prefill attention: plain Triton, as this Triton's Gluon lacks something ({error})"
    reason = unsupported_on_hopper(shape.head_dim, shape.block_size, shape.dtype, capability)
    if reason is not None:
        return None, f"prefill attention: plain Triton, as {reason}"
    reason = flash_prefill.unsupported(shape.head_dim, shape.block_size, shape.dtype, capability)
    if reason is not None:
        return attend_prefill_hopper, f"prefill attention: Gluon for Hopper, as {reason}"

    def attend_by_tile(
        queries: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        table: torch.Tensor,
        work: PrefillWork,
        out: torch.Tensor,
        *,
        scale: float,
        scratch: PrefillScratch,
    ) -> None:
        is_high = work.tile_rows == flash_prefill.DEFAULT.tile_rows
        attend = flash_prefill.attend_prefill_flash if is_high else attend_prefill_hopper
        attend(queries, k_cache, v_cache, table, work, out, scale=scale, scratch=scratch)

    choice = "CUDA C++ for Hopper, Gluon for low tiles, plain Triton for windows and soft caps"
    return attend_by_tile, f"prefill attention: {choice}"
