"""The part of a host backend that is not arithmetic: one launch thread that runs steps in order, rows, sampling. A
backend gives `forward`; everything else that a Step asks for is done here, once for all of them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.block_conversion import BlockConversion
from twostroke.backends.host.companions import TargetPass
from twostroke.backends.host.draft_blocks import AllBlocks, DrafterBlocks
from twostroke.backends.host.draft_model import DraftModel
from twostroke.backends.host.draft_rows import DraftRows
from twostroke.backends.host.head_drafter import Network, SlotDrafter
from twostroke.backends.host.heads import head_drafter
from twostroke.backends.host.kept_blocks import BlockStore, HostKeptBlocks
from twostroke.backends.host.pooling import Pooler
from twostroke.backends.host.rows import RowSet
from twostroke.backends.host.sampler import token_logprobs
from twostroke.backends.host.scores import HostModel, Scores
from twostroke.backends.host.states import HostStates, StateKeeper
from twostroke.backends.interface import Companion, Listener, refuse_drafts
from twostroke.core.errors import BackendError
from twostroke.core.grammar import Grammars, GrammarStuckError
from twostroke.core.kv_blocks import KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.speculation import DrafterState
from twostroke.core.step import Drafted, PrefillChunk, SampledToken, Step, StepResult, TokenLogprobs
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.pooling import Pooling
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.speculator import Speculator

NOT_FINITE = "the model produced logits that are not finite"
VECTOR_NOT_FINITE = "the model produced a vector that is not finite"


MAX_DRAFTS = 32
HAND_OVER_S = 1e-3
"""The longest that a step waits until its caller has taken the first tokens of the step before."""
LOOK_UP_S = 0.2
"""How often a caller that waits for a step looks whether it was interrupted."""


class HostTicket:
    def __init__(self, future: Future[StepResult], taken: threading.Event | None) -> None:
        """`taken` is set when the caller has the result, if anyone waits for that."""
        self._future, self._taken = future, taken

    @property
    def ready(self) -> bool:
        return self._future.done()

    def result(self) -> StepResult:
        """Waits in short pieces: an interrupt that comes just before a wait begins does not end that wait."""
        while True:
            try:
                result = self._future.result(LOOK_UP_S)
                break
            except TimeoutError:  # the wait is over, unless the step itself raised it
                if self._future.done():
                    result = self._future.result()
                    break
        if self._taken is not None:
            self._taken.set()
        return result


class HostBackend(ABC):
    name: str
    max_drafts = MAX_DRAFTS

    def __init__(self, layout: KVLayout, max_context: int, vocab_size: int, pooling: Pooling | None = None) -> None:
        """`pooling` is set for a model that gives vectors. None means that it writes tokens."""
        self.layout = layout
        self._pooler = None if pooling is None else Pooler(pooling)
        self.rows = RowSet(layout, max_context, vocab_size)
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self.name}-launch")
        self._first_tokens_taken: threading.Event | None = None
        """The event of the last step that was launched, if it ends a prompt."""
        self.speculator: Speculator | None = None
        """Makes drafts. None means that nobody does."""
        self.companion_drafters: list[Drafter] = []
        self._draft_blocks: dict[int, DrafterBlocks] = {}
        """The blocks of companion drafters, by their `KVGroup.model`."""
        self._last_pass: TargetPass | None = None
        """The pass that companion drafters have not been told of yet."""
        self._max_context, self._vocab_size = max_context, vocab_size
        self._kept: HostKeptBlocks | None = None
        self._states: StateKeeper | None = None
        self.host_states: HostStates | None = None
        """The states of layers that keep some. None means that no layer does."""
        self._listener: Listener | None = None

    @property
    def block_store(self) -> BlockStore:
        """The KV of the model that answers."""
        raise BackendError(f"the {self.name} backend does not give its KV out")

    @cached_property
    def _blocks(self) -> BlockStore:
        """All KV of the layout."""
        return AllBlocks(self.layout, self.block_store, self._draft_blocks) if self._draft_blocks else self.block_store

    @property
    def arithmetic_name(self) -> str:
        """The name of all that decides the numbers in KV, beside weights and formats."""
        return "numpy"

    @abstractmethod
    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Computes every token of the batch, writes its KV, and returns logits  # [len(batch.logit_rows), vocab]"""

    def states(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Computes every token of the batch, for a model that gives vectors. Returns the last states of the wanted
        rows, normed if the model norms them  # [len(batch.logit_rows), hidden]"""
        raise BackendError(f"the {self.name} backend gives no vectors")

    def score(self, batch: Batch) -> Scores:
        """Runs `forward`, and finds the likeliest tokens. A backend that finds them sooner overrides this."""
        return Scores.of(self.forward(batch))

    def why_not_finite(self) -> str:
        """Called if logits are not finite. A backend that can say more, or mend something, overrides this."""
        return NOT_FINITE

    # Blocks as bytes

    @property
    def block_format(self) -> KVFormat:
        return KVFormat(self.name, self.arithmetic_name, self.layout.block_size, self._blocks.block_formats())

    def block_converter(self) -> BlockConversion:
        return BlockConversion(self.block_format)

    def read_blocks(self, group: int, block_ids: Sequence[int], into: memoryview) -> None:
        parts = self._parts(group, block_ids, into)
        self._launcher.submit(self._copy_out, group, block_ids, parts).result()

    def write_blocks(self, group: int, block_ids: Sequence[int], data: memoryview) -> None:
        parts = self._parts(group, block_ids, data)
        self._launcher.submit(self._copy_in, group, block_ids, parts).result()

    def _parts(self, group: int, block_ids: Sequence[int], memory: memoryview) -> npt.NDArray[np.uint8]:
        size, num_blocks = self.block_format.groups[group].num_bytes, self.layout.groups[group].num_blocks
        if memory.nbytes != size * len(block_ids):
            raise BackendError(
                f"{len(block_ids)} KV blocks of group {group} are {size} bytes each, not {memory.nbytes}"
            )
        if any(not 0 <= block < num_blocks for block in block_ids):
            raise BackendError(f"KV group {group} has blocks 0 to {num_blocks - 1}, not {list(block_ids)}")
        return np.frombuffer(memory, dtype=np.uint8).reshape(len(block_ids), size)

    def _copy_out(self, group: int, block_ids: Sequence[int], parts: npt.NDArray[np.uint8]) -> None:
        if self._kept is not None:
            self._kept.finish()
        for block, part in zip(block_ids, parts, strict=True):
            self._blocks.copy_out(group, block, part)

    def _copy_in(self, group: int, block_ids: Sequence[int], parts: npt.NDArray[np.uint8]) -> None:
        if self._kept is not None:
            self._kept.finish()
        for block, part in zip(block_ids, parts, strict=True):
            self._blocks.copy_in(group, block, part)

    def keep_blocks(self, num_slots: Sequence[int]) -> HostKeptBlocks:
        self._kept = HostKeptBlocks(self._blocks, num_slots)
        return self._kept

    def use_states(self, states: HostStates) -> None:
        """Sets the states of a model whose layers keep some. Called once, before the first step."""
        self.host_states = states
        self._states = StateKeeper(self.layout, self.rows, states)

    def use_grammars(self, grammars: Grammars) -> None:
        self.rows.grammars = grammars

    def tell(self, listener: Listener | None) -> None:
        """Sets who is told of each prompt. From then on a pass keeps what the wanted layers leave, and no more."""
        self._listener = listener

    def add_head(
        self, companion: Companion, target: Checkpoint, taps: tuple[int, ...], network: Network | None = None
    ) -> None:
        """Adds a head that drafts. `taps` are the layers whose residuals a pass keeps, in order. `network` is a
        backend's own arithmetic for it, in place of numpy's."""
        drafter = head_drafter(companion, target, taps, self.rows, self.layout, self._max_context, network)
        if isinstance(drafter, SlotDrafter):
            self._draft_blocks[companion.number] = drafter.blocks
        self.companion_drafters.append(drafter)

    def add_companion(self, companion: Companion, model: HostModel, max_tokens_per_step: int) -> None:
        """Adds a model that drafts, whose KV lies in its own groups of the layout."""
        assert companion.method == DraftModel.name
        drafter = DraftModel(
            model,
            DraftRows(self.rows, self.layout, companion.number),
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            max_tokens=max_tokens_per_step,
        )
        self._draft_blocks[companion.number] = drafter.blocks
        self.companion_drafters.append(drafter)

    def use_speculator(self, speculator: Speculator) -> None:
        self.speculator = speculator
        speculator.watch(self.rows.matcher)

    def forget_texts(self) -> None:
        if self.speculator is not None:
            self._launcher.submit(self.speculator.forget)

    def drafter_states(self) -> tuple[DrafterState, ...]:
        return () if self.speculator is None else self.speculator.states()

    def launch(self, step: Step) -> HostTicket:
        refuse_drafts(self, step)
        taken = threading.Event() if any(chunk.samples for chunk in step.prefills) else None
        future = self._launcher.submit(self._execute_next, step, self._first_tokens_taken)
        self._first_tokens_taken = taken
        return HostTicket(future, taken)

    def _execute_next(self, step: Step, first_tokens_taken: threading.Event | None) -> StepResult:
        """Waits a little before it prepares a step: that takes Python's lock, and so does handing over the first tokens
        of the step before, for which a user waits. The wait is short, since the step before may have failed."""
        if first_tokens_taken is not None:
            first_tokens_taken.wait(HAND_OVER_S)
        return self.execute(step)

    def execute(self, step: Step) -> StepResult:
        """Runs one step to its end on the calling thread."""
        if self._kept is not None:
            self._kept.start(step)
            self._kept.wait(step)
        started_s = time.perf_counter()  # copies do not count as time of the step
        self.rows.update(step)
        if self._states is not None:
            self._states.begin(step)
        if self._pooler is not None:
            return self._pooled_result(self._pooler, step, started_s)
        updated_s = time.perf_counter()
        drafts = self._draft(step)
        drafting_s = time.perf_counter() - updated_s
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        errors: dict[int, str] = {}
        stuck: set[int] = set()
        if step.num_tokens:
            batch = Batch.from_step(step, self.rows, drafts)
            scores = self.score(batch)
            logits, highest, cursor = scores.logits, scores.highest, 0
            for slot in step.decodes:
                guesses = drafts.get(slot.seq_id, ())
                for place, guess in enumerate((*guesses, None), start=cursor):
                    if not self._sample(slot.seq_id, logits[place], highest[place], sampled, errors, stuck, guess):
                        break
                cursor += 1 + len(guesses)
            for chunk in step.prefills:
                if chunk.prompt_logprobs is not None:
                    end = cursor + len(chunk.token_ids)
                    if None in highest[cursor:end]:
                        errors[chunk.seq_id] = self.why_not_finite()
                    else:
                        prompt_logprobs[chunk.seq_id] = _chunk_logprobs(chunk, logits[cursor:end])
                    cursor = end
                elif chunk.samples:
                    cursor += 1
                if chunk.samples and chunk.seq_id not in errors:
                    self._sample(chunk.seq_id, logits[cursor - 1], highest[cursor - 1], sampled, errors, stuck)
        if self._states is not None:
            self._states.end(step, drafts, sampled)
        drafted = {} if self.speculator is None else self._settle(self.speculator, sampled)
        if step.num_tokens and (self.companion_drafters or self._listener is not None):
            done = TargetPass(step, batch, drafts, scores)
            if self.companion_drafters:
                self._last_pass = done
            if self._listener is not None:
                self._tell(self._listener, done)
        compute_s = time.perf_counter() - started_s
        return StepResult(
            step.step_id,
            sampled,
            prompt_logprobs,
            errors,
            compute_s,
            self.others_share,
            drafted,
            drafting_s,
            frozenset(stuck),
        )

    @staticmethod
    def _tell(listener: Listener, done: TargetPass) -> None:
        rows, layers = done.rows(), sorted(listener.layers)
        for chunk in done.step.prefills:
            own = rows[chunk.seq_id]
            states = [done.scores.taps[layers.index(layer)][own.start : own.stop] for layer in listener.layers]
            listener.heard(chunk.seq_id, chunk.start, states)

    def _pooled_result(self, pooler: Pooler, step: Step, started_s: float) -> StepResult:
        vectors, failed = self._vectors(pooler, step)
        if self._states is not None:
            self._states.end(step, {}, {})
        compute_s = time.perf_counter() - started_s
        return StepResult(step.step_id, {}, {}, failed, compute_s, self.others_share, vectors=vectors)

    def _vectors(self, pooler: Pooler, step: Step) -> tuple[dict[int, bytes], dict[int, str]]:
        """Returns the vector of each chunk that is pooled, or what went wrong with it."""
        vectors: dict[int, bytes] = {}
        errors: dict[int, str] = {}
        batch = Batch.from_step(step, self.rows, pooled=pooler.wanted)
        states, cursor = self.states(batch), 0
        for chunk in step.prefills:
            if not chunk.pools:
                continue
            count = len(chunk.token_ids) if pooler.wanted == "all" else 1
            vector = pooler.vector(states[cursor : cursor + count])
            cursor += count
            if np.isfinite(vector).all():
                vectors[chunk.seq_id] = vector.astype("<f4").tobytes()
            else:
                errors[chunk.seq_id] = VECTOR_NOT_FINITE
        return vectors, errors

    def _draft(self, step: Step) -> dict[int, tuple[int, ...]]:
        """Returns the tokens to compute behind each slot's own: the step's, or the speculator's."""
        if self.speculator is not None:
            done, self._last_pass = self._last_pass, None
            self.speculator.update(step, done)
        if not step.has_drafts:
            return {}
        found = {slot.seq_id: self.rows[slot.seq_id].drafts_left(slot.drafts) for slot in step.decodes if slot.drafts}
        if self.speculator is not None:
            found |= {seq_id: draft.token_ids for seq_id, draft in self.speculator.draft(step).items()}
        return {seq_id: token_ids for seq_id, token_ids in found.items() if token_ids}

    @staticmethod
    def _settle(speculator: Speculator, sampled: dict[int, tuple[SampledToken, ...]]) -> dict[int, Drafted]:
        drafted = {}
        for seq_id, tokens in sampled.items():
            told = speculator.settle(seq_id, [token.token_id for token in tokens])
            if told is not None:
                drafted[seq_id] = told
        return drafted

    @property
    def others_share(self) -> float:
        """The share of this backend's cores that other programs took lately. It is 0 if it does not know."""
        return 0.0

    def _sample(
        self,
        seq_id: int,
        logits: npt.NDArray[np.float32],
        highest: int | None,
        sampled: dict[int, tuple[SampledToken, ...]],
        errors: dict[int, str],
        stuck: set[int],
        guess: int | None = None,
    ) -> bool:
        """Chooses the row's next token, as always. Returns whether it is the guessed one: if so, what was computed
        behind the guess is what follows the token."""
        row = self.rows[seq_id]
        if highest is None:
            errors[seq_id] = self.why_not_finite()
            return False  # a step that was launched behind this one reads the old last token, and is dropped
        try:
            token = row.sampler.sample(logits, highest)
        except GrammarStuckError as error:
            errors[seq_id] = str(error)
            stuck.add(seq_id)
            return False
        row.last_token = token.token_id
        row.length += 1
        sampled[seq_id] = (*sampled[seq_id], token) if seq_id in sampled else (token,)
        return token.token_id == guess and guess not in row.stop_ids

    def close(self) -> None:
        self._launcher.shutdown(wait=True)
        if self._kept is not None:
            self._kept.close()


def _chunk_logprobs(chunk: PrefillChunk, logits: npt.NDArray[np.float32]) -> tuple[TokenLogprobs, ...]:
    """Returns, for each position of the chunk, the logprobs of the token that follows it in the prompt."""
    assert chunk.prompt_logprobs is not None
    targets = [*chunk.token_ids[1:]]
    if chunk.next_token_id is not None:
        targets.append(chunk.next_token_id)
    return tuple(
        token_logprobs(row, target, chunk.prompt_logprobs) for row, target in zip(logits, targets, strict=False)
    )
