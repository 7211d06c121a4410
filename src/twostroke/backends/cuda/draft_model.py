"""A smaller model that drafts, on the device: it reads along with the model, token by token and in the same chunks, and
goes on from there by its likeliest token, all in the graphs of the steps themselves. `backends/host/draft_model.py` has
the same on a host. Knows no policy: how many drafts are made, it is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.backends.cuda.buffers import Buffers, tensor_bytes
from twostroke.backends.cuda.draft_clock import DraftClock
from twostroke.backends.cuda.draft_names import DraftNames
from twostroke.backends.cuda.drafting import MAX_DRAFTS
from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.backends.cuda.kernels.paged import NO_SCALES
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.mixers import kernels_of
from twostroke.backends.cuda.model import Decoder
from twostroke.backends.cuda.model_matrices import held_of, held_on, held_weight_bytes, quantising_bytes
from twostroke.backends.cuda.one_byte_kv import OneByteKV
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.passes import Decodes, Pass, TokenArrays
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import SamplingRows
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.cuda.verify import most_queries
from twostroke.backends.cuda.weights import Weights
from twostroke.backends.interface import Companion
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class CompanionRows:
    """`ModelRows`: those of the model that answers, with the tables of the companion's groups."""

    tables: tuple[torch.Tensor, ...]
    last_tokens: torch.Tensor
    sampling: SamplingRows
    second_texts: torch.Tensor

    @staticmethod
    def of(rows: DeviceRows, layout: KVLayout, model: int, *, has_all_tokens: bool) -> CompanionRows:
        """`has_all_tokens`: whether it knows every token of the other; else its last tokens are its own to write."""
        tables = tuple(rows.tables[place] for place in layout.places_of(model))
        last_tokens = rows.last_tokens if has_all_tokens else rows.last_tokens.clone()
        return CompanionRows(tables, last_tokens, rows.sampling, rows.second_texts)


class DraftModelDrafter:
    """A `DeviceDrafter`. Every row is read along, whether it is drafted for or not: its keys are never missing, of
    prefixes neither. A step that verifies drafts is read once more as a whole, as drafts may be the host's."""

    name = "draft"
    taps = ()
    most = MAX_DRAFTS

    def __init__(
        self,
        companion: Companion,
        parts: Parts,
        layout: KVLayout,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        vocab_size: int,
        max_context: int,
        choices: Choices,
    ) -> None:
        """`vocab_size`, `max_context`: of the model that is drafted for."""
        spec, device = companion.checkpoint.spec, parts.tokens.device
        num_tokens, num_rows = len(parts.buffers.residual), parts.rows.padding_row
        self.source, self.max_context = companion.checkpoint.name, min(max_context, spec.max_context)
        num_queries = most_queries(num_rows, num_tokens)
        held = held_on(held_of(companion.checkpoint, companion.formats), spec, choices.card)
        self._weights, self._loader = Weights.placed(companion.checkpoint, device, dtype, None, held)
        self._buffers = Buffers(spec, num_tokens, num_rows, device, dtype, held)
        one_byte = OneByteKV.of(companion.checkpoint, companion.formats, device)
        self.kernels = kernels_of(
            spec,
            layout.block_size,
            dtype,
            device,
            num_rows=num_rows,
            num_queries=num_queries,
            max_drafts=MAX_DRAFTS,
            scaled=NO_SCALES if one_byte is None else one_byte.scaled,
        )
        self._place = len(parts.kernels)
        """Of its tiles: behind those of the model that answers."""
        self._target = parts.rows
        self._vocab_size = min(vocab_size, spec.vocab_size)
        self._has_all_tokens = spec.vocab_size >= vocab_size
        self._rows = CompanionRows.of(parts.rows, layout, companion.number, has_all_tokens=self._has_all_tokens)
        self.blocks = kv = KVStore(spec, layout.of_model(companion.number), device, kv_dtype, one_byte)
        self._decoder = Decoder(spec, self._weights, kv, self.kernels, self._buffers, self._rows, max_context, choices)
        self._nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._places = torch.zeros(MAX_DRAFTS, num_rows, dtype=torch.int32, device=device)
        self._places -= torch.arange(1, 1 + MAX_DRAFTS, dtype=torch.int32, device=device)[:, None]
        """Where a chain's tokens stand: behind the row's last (`FROM_ROW`)."""
        self._chain_rows = torch.zeros_like(self._places)
        self._names = DraftNames(parts.rows, torch.arange(self._vocab_size, dtype=torch.int32, device=device))
        self._clock = DraftClock(parts.graphs)

    def load(self) -> tuple[str, ...]:
        self._loader.fill(None)
        return ()

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return num_drafts * self._clock.a_draft_s(num_streams)

    def prepare(self, *, rehearses: bool) -> None:
        self._decoder.prepare()
        if not rehearses:
            self._clock.time_all(self.draft, self._target.padding_row, self._nothing.device)

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        """Write the keys of all tokens of a pass. Those of drafts that will not hold are written, too; what comes in
        their place is written over them."""
        tokens = done.tokens
        known = TokenArrays(self._known(tokens.token_ids), tokens.rows, tokens.positions)
        work = None if done.prefill is None else done.prefill.at(self._place)
        self._decoder.forward(Pass(known, done.decodes, work), wanted=self._nothing)

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """The likeliest token after another. The last one is not read here: the pass that verifies it is read along."""
        count = len(rows) // width
        self._chain_rows[: width - 1, :count].copy_(rows.view(count, width)[:, 1:].t())
        logits = self._buffers.logits[:count, : self._vocab_size]
        for step in range(width - 1):
            own_rows, token_ids = self._chain_rows[step, :count], self._token_ids[:count]
            if step == 0:
                token_ids = self._known(token_ids.fill_(FROM_ROW))
            else:
                torch.index_select(drafts[:, step - 1], 0, own_rows, out=token_ids)
                token_ids.clamp_(min=0)  # none was found where scores were not finite
            tokens = TokenArrays(token_ids, own_rows, self._places[step, :count])
            self._decoder.logits(self._decoder.forward(Pass(tokens, Decodes(count))))
            self._names.name(logits, own_rows, drafts, step)

    def _known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Without tokens that it does not have: entries that only fill the other's table up."""
        if self._has_all_tokens:
            return token_ids
        last = self._vocab_size - 1
        torch.clamp(self._target.last_tokens, max=last, out=self._rows.last_tokens)
        return torch.clamp(token_ids, max=last, out=self._token_ids[: len(token_ids)])


def companion_bytes(checkpoint: Checkpoint, formats: Formats, sizes: StepSizes) -> int:
    """Of weights, and of room for what it computes. `sizes`: of steps, at most."""
    held, nowhere = held_of(checkpoint, formats), torch.device("meta")
    card = card_of(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else None
    if card is not None:
        held = held_on(held, checkpoint.spec, card)
    buffers = Buffers(checkpoint.spec, sizes.max_tokens_per_step, sizes.max_running, nowhere, torch.bfloat16, held)
    weight_bytes = held_weight_bytes(checkpoint, formats, card) + quantising_bytes(checkpoint, formats)
    return weight_bytes + tensor_bytes(buffers)
