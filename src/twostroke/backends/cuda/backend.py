"""The CUDA backend: executes Steps on one device. A step of decodes goes by decode.py, one with prompt chunks by
prefill.py. Launching returns at once: sampled tokens stay on the device, where the next step finds them, and the host
reads them when they have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from twostroke.backends.cuda.buffers import Buffers
from twostroke.backends.cuda.captured_sizes import MAX_CHUNKS
from twostroke.backends.cuda.compile_ahead import compiled_ahead
from twostroke.backends.cuda.decode import DecodePath
from twostroke.backends.cuda.draft_blocks import AllBlocks
from twostroke.backends.cuda.drafting import MAX_DRAFTS, DeviceDrafter
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.backends.cuda.guarded_drafter import GuardedDrafter
from twostroke.backends.cuda.guessing import Guesser
from twostroke.backends.cuda.kept_blocks import BATCH_BLOCKS, CudaKeptBlocks
from twostroke.backends.cuda.kernels.paged import NO_SCALES
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.layer_matrices import products_of
from twostroke.backends.cuda.logprobs import logprob_readers
from twostroke.backends.cuda.mixers import kernels_of
from twostroke.backends.cuda.model import Decoder
from twostroke.backends.cuda.model_matrices import held_of, held_on
from twostroke.backends.cuda.one_byte_kv import OneByteKV
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.prefill import PrefillPath
from twostroke.backends.cuda.products import card_for
from twostroke.backends.cuda.ranks import CardRanks
from twostroke.backends.cuda.results import NONE, Advances, CudaTicket, PromptLogprobReader, Results, sampling_ids
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import SamplingRows
from twostroke.backends.cuda.staging import Staging
from twostroke.backends.cuda.states import DeviceStates
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.cuda.vectors import VectorPath
from twostroke.backends.cuda.verify import Guess, VerifyPath, most_queries
from twostroke.backends.cuda.weights import Progress, Weights
from twostroke.backends.host.block_conversion import BlockConversion
from twostroke.backends.interface import Listener, refuse_drafts
from twostroke.core.errors import BackendError
from twostroke.core.formats import STORED, Formats
from twostroke.core.grammar import Grammars
from twostroke.core.kv_blocks import KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.speculation import DrafterState
from twostroke.core.step import Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.speculation.speculator import Speculator
from twostroke.speculation.unseen import UnseenDrafts

STAGED_PER_TOKEN = 8
"""Integers of a step's arrays a token, at most: three of its own, its share of segments and of attention's tiles. Of a
model that reads along there are tiles, too."""
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32} | dict.fromkeys(
    ("fp8", "int8"), torch.bfloat16
)
"""Of `Formats.arithmetic` and `Formats.kv`: what stands between products. In float32 kernels are held against plain
code; the factory offers none of it."""


@dataclass(frozen=True, slots=True)
class _Loading:
    weights_s: float
    packing_s: float  # of them
    left_plain: tuple[str, ...]  # matrices that could not be packed


DrafterOf = Callable[[Parts], DeviceDrafter]


class CudaBackend:
    name = "cuda"
    unseen: UnseenDrafts | None = None
    """Of whoever drafts on the device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: KVLayout,
        *,
        device: torch.device,
        formats: Formats,
        max_context: int,
        max_tokens_per_step: int,
        max_running: int,
        choices: Choices | None = None,
        progress: Progress | None = None,
        max_drafts: int = MAX_DRAFTS,
        drafter: DrafterOf | None = None,
        forced: Sequence[int] | None = None,
        listener: Listener | None = None,
        ranks: CardRanks | None = None,
    ) -> None:
        """`choices`: which kernels multiply what; None: what tables say of this device. `max_drafts`: of a slot; 0:
        nothing is made ready for drafts. `drafter`: who makes some on the device. `forced`: see `VerifyPath`.
        `listener`: in a drafter's place. `ranks`: of a checkpoint that is one rank's part, all of them."""
        spec, dtype, has_copies = checkpoint.spec, DTYPES[formats.arithmetic], formats.copies is not None
        started_s = time.perf_counter()
        choices = choices or Choices.on(card_for(device, dtype, formats))
        held = held_on(held_of(checkpoint, formats), spec, choices.card)
        weights, loader = Weights.placed(checkpoint, device, dtype, choices if has_copies else None, held)
        max_rows = min(max_running, max_tokens_per_step)
        max_queries = most_queries(max_rows, max_tokens_per_step) if max_drafts else 0
        max_sampled = max(max_rows + MAX_CHUNKS, max_queries)  # a captured step has room for padding
        sampling = SamplingRows(max_rows, spec.vocab_size, device, max_batch=max_sampled)
        rows = DeviceRows(layout, max_rows, max_context, sampling, device)
        buffers = Buffers(spec, max_tokens_per_step, max_sampled, device, dtype, held, max_queries, choices)
        one_byte = OneByteKV.of(checkpoint, formats, device)
        kernels = kernels_of(
            spec,
            layout.block_size,
            dtype,
            device,
            num_rows=max_rows,
            num_queries=max_queries,
            max_drafts=max_drafts,
            scaled=NO_SCALES if one_byte is None else one_byte.scaled,
        )
        kv = KVStore(spec, layout.of_model(0), device, DTYPES[formats.kv], one_byte)
        self._kv, self._layout, self._arithmetic = kv, layout, f"{formats.weights}, {formats.arithmetic}"
        self._kept: CudaKeptBlocks | None = None
        self._device, self.max_drafts = device, max_drafts
        self._parts = Parts(
            rows=rows,
            decoder=Decoder(spec, weights, kv, kernels, buffers, rows, max_context, choices, ranks=ranks),
            buffers=buffers,
            kernels=kernels,
            graphs=GraphCache(device, captures=ranks is None or ranks.is_captured),
            staging=Staging((len(kernels) + bool(drafter)) * STAGED_PER_TOKEN * (max_tokens_per_step + 4096), device),
            tokens=torch.zeros(max_sampled, dtype=torch.int32, device=device),
            states=None if kv.states is None else DeviceStates(kv, rows),
        )
        self._drafter = None if drafter is None else drafter(self._parts)
        self._blocks = AllBlocks(layout, kv, None if self._drafter is None else self._drafter.blocks)
        self._guarded = None if self._drafter is None else GuardedDrafter(self._drafter)
        self._listener = listener
        self._keep_what_is_heard()
        self._decodes = DecodePath(self._parts, max_rows)
        self._verifies = VerifyPath(self._parts, max_rows, self._guarded, forced) if max_drafts else None
        beside = () if self._drafter is None else self._drafter.kernels
        pooling = checkpoint.pooling
        self._vectors = None if pooling is None else VectorPath(pooling, self._parts, max_rows, max_context)
        self._prefills = self._vectors or PrefillPath(self._parts, max_rows, max_context, beside)
        self._guesser = self._who_guesses()
        self._results = Results(max(max_rows, max_queries), device)
        times = self._get_ready(partial(loader.fill, progress), weights)
        rest_s = time.perf_counter() - started_s - times.weights_s
        self.notes = (
            self._told(times, rest_s, has_copies=has_copies),
            *dict.fromkeys(one.prefill_choice for one in kernels),
            choices.note(products_of(spec), checkpoint.name),
            *loader.notes,
            *(f"as stored: {note}" for note in held.notes if formats.weights == STORED),
            *(f"decode reads {name} unpacked: not all of its weights are finite" for name in times.left_plain),
        )

    def _keep_what_is_heard(self) -> None:
        """The residual stream behind layers that a drafter, or a listener in its place, reads."""
        if self._drafter is not None and self._guarded is not None:
            self._parts.decoder.keep(self._drafter.taps, self._guarded.follow)
        if self._listener is not None:
            self._parts.decoder.keep(self._listener.layers, lambda done, taps: None)

    def _who_guesses(self) -> Guesser:
        guesser, own = Guesser(), self._drafter
        guesser.matcher_of = self._parts.rows.grammars.known_matcher
        if own is not None:
            self.unseen = UnseenDrafts(own.name, own.source, own.seconds, own.most, own.max_context)
            guesser.unseen = self.unseen
        return guesser

    def _told(self, times: _Loading, rest_s: float, *, has_copies: bool) -> str:
        """What the start took."""
        graphs = self._parts.graphs
        again = f", {graphs.num_made_again} of them made again" if graphs.num_made_again else ""
        packed = f" ({times.packing_s:.1f} of them to pack copies for decode)" if has_copies else ""
        return f"weights in {times.weights_s:.1f} s{packed}, kernels and {len(graphs)} graphs in {rest_s:.1f} s{again}"

    def _get_ready(self, load_weights: Callable[[], None], weights: Weights) -> _Loading:
        """Kernels are compiled while weights load."""

        def rehearse() -> None:
            weights.rehearse_packing()
            self.prepare(rehearses=True)

        with compiled_ahead(rehearse, wanted=self._device.type == "cuda"):
            started_s = time.perf_counter()
            load_weights()
            loaded_s = time.perf_counter()
            left_plain = weights.pack()
            if self._drafter is not None:
                left_plain = (*left_plain, *self._drafter.load())
            packed_s = time.perf_counter()
            if self._device.type == "cuda":
                self.prepare()
        if self._guarded is not None and self.unseen is not None:
            self._guarded.guard(self.unseen.give_up)
        if (ranks := self._parts.ranks) is not None:
            ranks.begin()
        return _Loading(packed_s - started_s, packed_s - loaded_s, left_plain)

    def prepare(self, *, rehearses: bool = False) -> None:
        """Launch every kernel that a step may need, on nobody's rows, and capture the steps that recur: no request
        waits for a compiler. A rehearsal captures nothing."""
        self._parts.rows.prepare()
        if self._parts.states is not None:
            self._parts.states.prepare()
        self._parts.decoder.prepare()
        self._prefills.prepare(rehearses=rehearses)
        if self._vectors is not None:
            return
        self._decodes.prepare(rehearses=rehearses)
        self._decodes.prepare_sampling()
        if self._verifies is not None:
            self._verifies.prepare(rehearses=rehearses)
            self._verifies.prepare_sampling()
        if self._drafter is not None:
            self._drafter.prepare(rehearses=rehearses)

    def use_grammars(self, grammars: Grammars) -> None:
        self._parts.rows.grammars.use(grammars)

    def use_speculator(self, speculator: Speculator) -> None:
        self._guesser.speculator = speculator
        speculator.watch(self._parts.rows.grammars.known_matcher)

    def forget_texts(self) -> None:
        if self._guesser.speculator is not None:
            self._guesser.speculator.forget()

    def drafter_states(self) -> tuple[DrafterState, ...]:
        on_host = () if self._guesser.speculator is None else self._guesser.speculator.states()
        return on_host if self.unseen is None else (*on_host, self.unseen.state)

    def launch(self, step: Step) -> CudaTicket:
        refuse_drafts(self, step)
        try:
            self._guesser.update(step)
            return self._start(step)
        except Exception:
            self._parts.decoder.before_layer = None
            self._parts.rows.take_back(step.joins)  # a step that did not start has opened no rows: none will be closed
            self._guesser.take_back(step.joins)
            raise

    def _start(self, step: Step) -> CudaTicket:
        parts = self._parts
        wait = None if self._kept is None else self._copies(self._kept, step)
        parts.rows.update(step)
        if parts.states is not None:
            parts.states.restore(step)
        guesses = self._guesses(step)
        arrival = self._results.start()
        rows: list[int] = []
        width = 1
        prompt_logprobs: dict[int, PromptLogprobReader] = {}
        if step.prefills:
            rows, prompt_logprobs = self._prefills.launch(step, wait)
            if self._listener is not None:
                self._tell(self._listener, step)
        elif guesses and self._verifies is not None:
            rows, width = self._verifies.launch(step, guesses)
        elif step.decodes:
            rows = self._decodes.launch(step)
        if parts.states is not None and not (guesses and self._verifies is not None):
            parts.states.save(step)
        num_queries = [1 + guess.num_drafts for guess in guesses] if width > 1 else None
        logprobs = logprob_readers(step, rows, parts, width, num_queries)
        grammars, sampled = parts.rows.grammars, sampling_ids(step)
        tokens, stuck = parts.tokens[: len(rows) * width], grammars.stuck(sampled)
        drafted = self._guesser.launched(step, guesses)
        advances = Advances(width, drafted, partial(self._guesser.settle, step, guesses))
        vectors = NONE if self._vectors is None else self._vectors.readers(step)
        ticket = self._results.collect(step, arrival, tokens, logprobs, prompt_logprobs, stuck, advances, vectors)
        grammars.expect(sampled, ticket)
        return ticket

    def _tell(self, listener: Listener, step: Step) -> None:
        """The pass is queued, and what it leaves stays until the next one is."""
        first = len(step.decodes)
        for chunk in step.prefills:
            end = first + len(chunk.token_ids)
            states = [self._parts.decoder.kept(layer)[first:end] for layer in listener.layers]
            listener.heard(chunk.seq_id, chunk.start, states)
            first = end

    def _copies(self, kept: CudaKeptBlocks, step: Step) -> Callable[[int | None], None] | None:
        """Queue a step's copies; what it is to call before it reads blocks that are on their way, if it reads some."""
        kept.start(step)
        copied = [(one.group, slot) for one in step.restores for slot in (one.source, one.target)]
        if copied_to := kept.loading({*copied, *((one.group, one.slot) for one in step.saves)}):
            kept.wait(copied_to)  # copies of states come before all layers
        jobs = kept.awaited(step.grants)
        if not jobs:
            return None
        if not step.prefills:
            kept.wait(jobs)
            return None
        # Behind the last layer comes whoever drafts, with blocks of its own.
        last = None if self._drafter is None else len(self._parts.decoder.weights.layers) - 1
        return lambda layer: kept.wait(jobs) if layer in (None, last) else kept.wait_for_layer(jobs, layer)

    # Blocks as bytes

    @property
    def block_format(self) -> KVFormat:
        return KVFormat(self.name, self._arithmetic, self._layout.block_size, self._blocks.block_formats())

    def block_converter(self) -> BlockConversion:
        return BlockConversion(self.block_format)

    def read_blocks(self, group: int, block_ids: Sequence[int], into: memoryview) -> None:
        target = self._blocks_in(group, block_ids, into)
        for first in range(0, len(block_ids), BATCH_BLOCKS):
            some = block_ids[first : first + BATCH_BLOCKS]
            target[first : first + len(some)] = self._blocks.gather(group, some).cpu()

    def write_blocks(self, group: int, block_ids: Sequence[int], data: memoryview) -> None:
        source = self._blocks_in(group, block_ids, data)
        for first in range(0, len(block_ids), BATCH_BLOCKS):
            some = block_ids[first : first + BATCH_BLOCKS]
            sent = source[first : first + len(some)].to(self._device)
            self._blocks.scatter(group, self._blocks.layers_of(group), some, sent)

    def _blocks_in(self, group: int, block_ids: Sequence[int], memory: memoryview) -> torch.Tensor:
        """[blocks, layers, ...] over memory that is not the device's. Every step and copy that was launched is done."""
        form, num_blocks = self._blocks.block_formats()[group], self._layout.groups[group].num_blocks
        if memory.nbytes != form.num_bytes * len(block_ids):
            raise BackendError(
                f"{len(block_ids)} KV blocks of group {group} are {form.num_bytes} bytes each, not {memory.nbytes}"
            )
        if any(not 0 <= block < num_blocks for block in block_ids):
            raise BackendError(f"KV group {group} has blocks 0 to {num_blocks - 1}, not {list(block_ids)}")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        shape = (len(block_ids), *self._blocks.block_shape(group))
        return torch.frombuffer(memory, dtype=self._blocks.dtype_of(group)).view(shape)

    def keep_blocks(self, num_slots: Sequence[int]) -> CudaKeptBlocks:
        self._kept = CudaKeptBlocks(self._blocks, num_slots, self._device)
        return self._kept

    def _guesses(self, step: Step) -> list[Guess]:
        """Of each slot, what is verified with it; empty: the step has no drafts."""
        if self._verifies is None or step.prefills or not step.has_drafts:
            return []
        return self._guesser.guesses(step, self._verifies.widths(len(step.decodes)))

    def abandon(self) -> None:
        """Of one rank of several: another is gone, and steps in flight are not waited for. From any thread."""
        if (ranks := self._parts.ranks) is not None:
            ranks.abandon()

    def close(self) -> None:
        self._parts.rows.grammars.shut_down()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.abandon()
