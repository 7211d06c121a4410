"""The prefill path: a step with prompt chunks, decodes beside them or not. All its tokens go through the model in one
pass; logits are computed only for tokens that are sampled or whose logprobs are wanted. Short steps (a tail behind a
prefix hit, chunks beside decodes) replay a captured graph up to their logits: launching kernels one by one would take
longer. Sampling follows kernel by kernel, so that one graph serves all that rows may want."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.batch import Batch, CapturedShape, Integers
from twostroke.backends.cuda.captured_sizes import CapturedSizes
from twostroke.backends.cuda.graphs import buckets_up_to
from twostroke.backends.cuda.kernels.prefill_tiles import ITEM_FIELDS, PrefillTiles, PrefillWork, Tiling
from twostroke.backends.cuda.kernels.state_items import SEGMENT_WORDS, TILE_WORDS, StateTiles, StateWork
from twostroke.backends.cuda.latent import LatentKernels
from twostroke.backends.cuda.logprobs import prompt_logprob_readers
from twostroke.backends.cuda.mixers import Kernels
from twostroke.backends.cuda.parts import PLAIN, Parts
from twostroke.backends.cuda.passes import Decodes, Pass, TokenArrays
from twostroke.backends.cuda.results import PromptLogprobReader, sampling_ids
from twostroke.core.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """A batch where the kernels find it."""

    tokens: TokenArrays
    decode_slots: int
    num_decodes: torch.Tensor | None  # int32 [1]: how many of the slots, the first, are decodes; None: all
    work: PrefillWork
    sampled_tokens: torch.Tensor
    sampled_rows: torch.Tensor


class PrefillPath:
    takes_first = False
    """See `Batch.from_step`."""

    def __init__(self, parts: Parts, max_rows: int, max_context: int, beside: Kernels = ()) -> None:
        """`beside`: of a model that reads along, if there is one."""
        self._parts = parts
        self._kernels = (*parts.kernels, *beside)
        self._max_context = max_context
        self._max_tokens = len(parts.buffers.residual)
        self._sampled_sizes = buckets_up_to(max_rows)
        room = min(self._max_tokens, max_context)
        self._sizes = self._captured(room, max_rows)

    def launch(
        self, step: Step, wait: Callable[[int | None], None] | None = None
    ) -> tuple[list[int], dict[int, PromptLogprobReader]]:
        """Start the step; tokens as with `DecodePath.launch`. Prompt logprobs can be read when the step is done.
        `wait`: called before a layer whose KV may still be on its way, or with None before all of them."""
        parts = self._parts
        wants_prompts = any(chunk.prompt_logprobs is not None for chunk in step.prefills)
        shape = None
        if not wants_prompts:
            num_tokens = len(step.decodes) + step.num_prefill_tokens
            shape = self._sizes.least(num_tokens, len(step.decodes), len(step.prefills))
        padded = self._padded_shape(step) if shape is None else shape
        index_of, padding_row = parts.rows.index_of, parts.rows.padding_row
        batch = Batch.from_step(step, index_of, padding_row, padded, takes_first=self.takes_first)
        staged = self._send(batch, shape)
        rows = batch.sampled_rows[: batch.num_sampled].tolist()
        prompt_logprobs: dict[int, PromptLogprobReader] = {}
        if wait is not None and shape is not None:
            wait(None)  # a graph is launched whole
            wait = None
        parts.decoder.before_layer = wait
        if shape is not None:
            parts.graphs.run(shape, lambda: self._run(staged))
        elif wants_prompts:
            everything = self._forward(staged, None)
            prompt_logprobs = prompt_logprob_readers(step, batch, everything, parts)  # before sampling takes the buffer
            if rows:
                parts.decoder.logits(everything[staged.sampled_tokens])
        else:
            self._run(staged)
        parts.decoder.before_layer = None
        if rows:
            self._sample(step, staged.sampled_rows[: len(rows)], rows)
        return rows, prompt_logprobs

    def prepare(self, *, rehearses: bool) -> None:
        """Capture the steps that recur, the largest first, and have every kernel of the general path compiled. A
        rehearsal only meets the kernels."""
        parts, padding_row, kinds = self._parts, self._parts.rows.padding_row, self._parts.decoder.distinct_layers
        longest_prompt = min(self._max_tokens, self._max_context)  # too long for a graph, perhaps, and not for a step
        sizes = {longest_prompt, *(max(1, self._max_tokens >> shift) for shift in range(4))}
        for size in sorted(sizes, reverse=True):
            nobodys = Batch.of_nobody(CapturedShape(size, 0, 1), padding_row, self._max_context)
            staged = self._send(nobodys, None)
            self._forward(staged, self._wanted(staged), kinds)
        for shape in self._sizes.at_start():
            staged = self._send(Batch.of_nobody(shape, padding_row, self._max_context), shape)
            if rehearses:
                self._run(staged, kinds)
            else:
                parts.graphs.prepare(shape, partial(self._run, staged), partial(self._run, staged, kinds))

    def _captured(self, room: int, max_rows: int) -> CapturedSizes:
        return CapturedSizes.of(room, max_rows, self._parts.decoder.multiply_adds_per_token)

    def _padded_shape(self, step: Step) -> CapturedShape:
        """Of a step that no graph is made for: as it is, but that behind the last attention it goes on, if anything is
        sampled, with as many rows as a step of decodes may have. The rest of the layer and the head then launch what
        start-up launched for those: kernels for other numbers would be loaded, or even compiled, while everybody
        waits."""
        num_decodes = len(step.decodes)
        num_sampled = num_decodes + sum(chunk.samples or chunk.pools for chunk in step.prefills)
        if num_sampled:  # no more than there are rows
            num_sampled = self._sampled_sizes[bisect_left(self._sampled_sizes, num_sampled)]
        return CapturedShape(num_decodes + step.num_prefill_tokens, num_decodes, num_sampled - num_decodes)

    def _send(self, batch: Batch, shape: CapturedShape | None) -> StagedBatch:
        cuts = [self._tiles(batch, shape, kernels) for kernels in self._kernels]
        arrays: tuple[Integers, ...] = (
            batch.token_ids,
            batch.rows,
            batch.positions,
            batch.sampled_tokens,
            batch.sampled_rows,
            np.array([batch.num_decodes], dtype=np.int32),
            *(tiles.items.reshape(-1) for tiles, _ in cuts),
        )
        if self._parts.states is not None:
            arrays += self._state_arrays(batch, shape)
        staging = self._parts.staging
        staging.send(arrays)
        sizes = tuple(len(array) for array in arrays)
        token_ids, rows, positions, sampled_tokens, sampled_rows, num_decodes, *others = staging.views(sizes)
        items, of_states = others[: len(cuts)], others[len(cuts) :]
        states = None
        if of_states:
            states = StateWork(of_states[0].view(-1, SEGMENT_WORDS), of_states[1].view(-1, TILE_WORDS))
        work: PrefillWork | None = None
        for (tiles, tiling), own in reversed(list(zip(cuts, items, strict=True))):
            work = PrefillWork(
                own.view(-1, ITEM_FIELDS),
                tiles.tile_rows,
                tiles.part_items if shape is None else tiling.most_parts,
                tiles.longest_context if shape is None else self._max_context,
                tiles.has_prefix or shape is not None,
                states,
                beside=work,
            )
        assert work is not None
        tokens = TokenArrays(token_ids, rows, positions)
        if shape is None:  # with as many slots as decodes, attention is cut by the kernels that steps of decodes have
            return StagedBatch(tokens, batch.num_decodes, None, work, sampled_tokens, sampled_rows)
        return StagedBatch(tokens, shape.decode_slots, num_decodes, work, sampled_tokens, sampled_rows)

    def _state_arrays(self, batch: Batch, shape: CapturedShape | None) -> tuple[Integers, Integers]:
        room = None if shape is None else (shape.num_tokens, shape.sampled_chunks)
        segments = (batch.segment_first, batch.segment_count, batch.segment_start, batch.segment_rows)
        tiles = StateTiles.build(segments, self._parts.rows.padding_row, room)
        return tiles.segments.reshape(-1), tiles.tiles.reshape(-1)

    @staticmethod
    def _tiles(
        batch: Batch, shape: CapturedShape | None, kernels: Attention | LatentKernels
    ) -> tuple[PrefillTiles, Tiling]:
        tiling, pad_items = kernels.tiling(int(batch.segment_count.sum())), None
        if shape is not None:  # a graph serves every step of its shape: its grid is fixed, what is over does nothing
            tiling = kernels.tiling(shape.num_tokens)
            pad_items = tiling.capacity(shape.num_tokens, shape.sampled_chunks)
        segments = (batch.segment_first, batch.segment_count, batch.segment_start, batch.segment_rows)
        return PrefillTiles.build(*segments, tiling, pad_items), tiling

    def _forward(
        self, staged: StagedBatch, wanted: torch.Tensor | None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """`layers`: only these; None: all."""
        parts, decodes = self._parts, Decodes(staged.decode_slots, staged.num_decodes)
        return parts.decoder.forward(Pass(staged.tokens, decodes, staged.work), layers=layers, wanted=wanted)

    def _run(self, staged: StagedBatch, layers: Sequence[int] | None = None) -> None:
        """Up to the logits."""
        residual = self._forward(staged, self._wanted(staged), layers)
        if len(residual):
            self._finish(residual)

    def _wanted(self, staged: StagedBatch) -> torch.Tensor | None:
        """The tokens whose last states are wanted; None: all."""
        return staged.sampled_tokens

    def _finish(self, residual: torch.Tensor) -> None:
        self._parts.decoder.logits(residual)

    def _sample(self, step: Step, sampled_rows: torch.Tensor, rows: list[int]) -> None:
        parts = self._parts
        features, masks = parts.rows.sampling.features(rows), None
        if features.is_plain:
            features = PLAIN
        else:
            masks = parts.rows.grammars.masks(sampling_ids(step))  # the device is at work while this waits
        parts.sample(sampled_rows, features, masks)
