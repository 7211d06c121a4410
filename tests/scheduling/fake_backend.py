"""A backend without arithmetic. It keeps rows as a real one does, and in place of keys and values it writes the whole
prefix that a key depends on; every step it checks that each key a query may read is the sequence's own. The token it
samples is a function of the prefix alone, so `expected_output` knows what a request must get without a scheduler.
It verifies drafts, the host's or its own, of which a random number holds; the keys of those that do not are rubbish.
A state is the whole prefix, too: one that was restored from the wrong place, or holds a draft that did not, is seen."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from twostroke.backends.interface import refuse_drafts
from twostroke.core.kv_blocks import BlockFormat, KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.step import DecodeSlot, Drafts, PrefillChunk, RowJoin, SampledToken, Step, StepResult, TokenLogprobs

MASK = (1 << 61) - 1
RUBBISH = -1
NOTHING = -2
"""In a copy of a block: nothing was ever written there."""


def fake_format(layout: KVLayout) -> KVFormat:
    """A content of 8 bytes for each position."""
    axes = (("layer", 1), ("position", layout.block_size))
    groups = tuple(BlockFormat(group.layers, group.window, "int64", 8, axes) for group in layout.groups)
    return KVFormat("fake", "", layout.block_size, groups)


class FakeBlocks:
    """Host memory, as bytes."""

    def __init__(self, layout: KVLayout, num_slots: Sequence[int], bytes_per_s: float = 1e3) -> None:
        self.spill_bytes_per_s = self.load_bytes_per_s = bytes_per_s
        size = layout.block_size * 8
        self._slots = [[memoryview(bytearray(size)) for _ in range(count)] for count in num_slots]

    is_idle = False
    """It tells nobody: loads are over when they should be."""

    def view(self, group: int, slot: int) -> memoryview:
        return self._slots[group][slot]


def mix(prefix: int, token: int) -> int:
    """The identity of a prefix one token longer: any change of an earlier token changes it."""
    value = ((prefix ^ (token + 0x9E3779B9)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (value ^ (value >> 31)) & MASK


def root_of(request: Request, isolated: bool) -> int:
    """What may never be shared differs here: salts, or whole requests."""
    text = f"{request.cache_salt}|{request.request_id if isolated else ''}"
    value = 0
    for byte in text.encode():
        value = mix(value, byte)
    return value


def sample(prefix: int, request: Request, sample_index: int, num_output: int, vocab_size: int) -> int:
    token = mix(mix(prefix, request.seed), sample_index) % vocab_size
    while token in request.stop_ids and num_output < request.sampling.min_tokens:
        token = (token + 1) % vocab_size
    return token


def expected_output(request: Request, sample_index: int, max_total_tokens: int, vocab_size: int) -> list[int]:
    """The tokens this sample gets when it is alone."""
    prefix = root_of(request, isolated=False)
    for token in request.prompt_token_ids:
        prefix = mix(prefix, token)
    output: list[int] = []
    while True:
        token = sample(prefix, request, sample_index, len(output), vocab_size)
        output.append(token)
        prefix = mix(prefix, token)
        if token in request.stop_ids and len(output) >= request.sampling.min_tokens:
            return output
        if len(request.prompt_token_ids) + len(output) == max_total_tokens:
            return output


@dataclass
class FakeRow:
    join: RowJoin
    tables: list[dict[int, int]]
    tokens: list[int]
    prefixes: list[int] = field(default_factory=list)  # of what tokens[: position + 1] is
    contents: list[int] = field(default_factory=list)  # what the KV of a position must hold
    computed: int | None = None  # positions below it hold what they must

    @property
    def position(self) -> int:
        """Where the last token enters."""
        return len(self.tokens) - 1

    def extend(self, isolated: bool, *tokens: int) -> None:
        request = self.join.request
        self.tokens += tokens
        while len(self.prefixes) < len(self.tokens):
            position = len(self.prefixes)
            token = self.tokens[position]
            before = self.prefixes[-1] if position else root_of(request, isolated=False)
            self.prefixes.append(mix(before, token))
            before = self.contents[-1] if position else root_of(request, isolated)
            self.contents.append(mix(before, token))


@dataclass(frozen=True)
class FakeTicket:
    outcome: StepResult

    @property
    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.outcome


class FakeBackend:
    name = "fake"
    max_drafts = 7

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_context: int,
        vocab_size: int,
        max_tokens_per_step: int,
        caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.max_tokens_per_step = max_tokens_per_step
        self.caching = caching
        self.rows: dict[int, FakeRow] = {}
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in layout.groups]  # (block, offset) to a content
        self.errors: dict[int, str] = {}
        """Sequences whose next logits are not finite."""
        self.num_holding: Callable[[int], int] = partial(random.Random(seed).randint, 0)
        """Of so many drafts that it makes for itself, how many hold."""
        self.steps: list[Step] = []
        self.blocks: FakeBlocks | None = None
        """Where there are tiers."""

    def launch(self, step: Step) -> FakeTicket:
        assert step.num_tokens > 0, "an empty step"
        assert step.num_tokens <= self.max_tokens_per_step, "over the token budget"
        if self.steps:
            assert step.step_id == self.steps[-1].step_id + 1
        self.steps.append(step)
        self._copy(step)
        self._update_rows(step)
        work = (*step.decodes, *step.prefills)
        assert len({item.seq_id for item in work}) == len(work), "a sequence with two pieces of work"
        refuse_drafts(self, step)
        self._restore(step)
        spans = [self._span(item) for item in work]
        result = self._results(step)
        for span in spans:
            self._write(*span)
        self._save(step, {row.join.seq_id: start for row, start, _ in spans})
        for row, start, _ in spans:
            self._read(row, start)
        return FakeTicket(result)

    def close(self) -> None:
        self.rows.clear()

    def _copy(self, step: Step) -> None:
        """Loads change blocks at once here: whoever still needed what was there would notice."""
        size = self.layout.block_size
        for group, block, slot in step.spills:
            assert self.blocks is not None
            contents = [self.kv[group].get((block, offset), NOTHING) for offset in range(size)]
            self.blocks.view(group, slot)[:] = struct.pack(f"<{size}q", *contents)
        for group, block, slot in step.loads:
            assert self.blocks is not None
            for offset, content in enumerate(struct.unpack(f"<{size}q", self.blocks.view(group, slot))):
                self.kv[group][block, offset] = content

    def _restore(self, step: Step) -> None:
        """In any order."""
        slots = [(group, source) for _, group, source, _ in step.restores]
        targets = [(group, target) for _, group, _, target in step.restores]
        targets += [(group, slot) for _, group, slot, _ in step.saves]
        assert len(set(targets)) == len(targets) and not set(slots) & set(targets), "copies that depend on their order"
        for seq_id, group, source, target in step.restores:
            assert self.rows[seq_id].tables[group] == {0: target}, "a state restored for somebody else"
            self.kv[group][target, 0] = self.kv[group][source, 0]

    def _save(self, step: Step, starts: dict[int, int]) -> None:
        for seq_id, group, slot, length in step.saves:
            row = self.rows[seq_id]
            assert length % self.layout.block_size == 0 and row.computed is not None
            if starts[seq_id] < length <= row.computed:
                self.kv[group][slot, 0] = row.contents[length - 1]
            else:
                assert any(slot.seq_id == seq_id for slot in step.decodes), "a chunk does not end where it is saved"

    def _update_rows(self, step: Step) -> None:
        for seq_id in step.leaves:
            assert seq_id in self.rows, f"row {seq_id} is closed twice, or was never open"
            del self.rows[seq_id]
        for join in step.joins:
            assert join.seq_id not in self.rows, f"row {join.seq_id} is open"
            tokens = [*join.request.prompt_token_ids, *join.output_token_ids]
            row = self.rows[join.seq_id] = FakeRow(join, [{} for _ in self.layout.groups], tokens)
            row.extend(self._is_isolated(row))
        for grant in step.grants:
            num_blocks = self.layout.groups[grant.group].num_blocks
            for index, block in enumerate(grant.block_ids, grant.first_index):
                assert 0 <= block < num_blocks
                assert index not in self.rows[grant.seq_id].tables[grant.group], "an entry granted twice"
                self.rows[grant.seq_id].tables[grant.group][index] = block

    def _is_isolated(self, row: FakeRow) -> bool:
        return not self.caching or row.join.request.sampling.prompt_logprobs is not None

    def _span(self, work: PrefillChunk | DecodeSlot) -> tuple[FakeRow, int, int]:
        """The positions that are computed."""
        assert work.seq_id in self.rows, f"work for row {work.seq_id}, which is closed"
        row = self.rows[work.seq_id]
        if isinstance(work, DecodeSlot):
            assert row.position <= work.position, "a row that is longer than its slot allows for"
            assert row.computed is not None and row.computed >= row.position, "a slot before its prefill"
            granted_end = work.position + work.num_queries
            assert granted_end < self.max_context
            last_entry = (granted_end - 1) // self.layout.block_size
            for group, table in zip(self.layout.groups, row.tables, strict=True):
                assert (0 if group.is_state else last_entry) in table, "drafts without a block"
            return row, row.position, row.position + work.num_queries
        assert work.token_ids and list(work.token_ids) == row.tokens[work.start : work.end]
        assert row.computed is None or row.computed == work.start, "a chunk that does not follow the last one"
        assert work.samples == (work.end == len(row.tokens))
        return row, work.start, work.end

    def _write(self, row: FakeRow, start: int, end: int) -> None:
        """At the end, drafts that did not hold."""
        block_size = self.layout.block_size
        for group, table, kv in zip(self.layout.groups, row.tables, self.kv, strict=True):
            if group.is_state:
                is_own = start == 0 or kv.get((table[0], 0)) == row.contents[start - 1]
                # Of a row that failed a token came in twice: what was launched behind it is dropped.
                assert is_own or row.join.seq_id in self.errors, "a state that is not its own"
                assert row.computed is not None
                kv[table[0], 0] = row.contents[row.computed - 1]
                continue
            for position in range(start, end):
                content = row.contents[position] if position < (row.computed or 0) else RUBBISH
                kv[table[position // block_size], position % block_size] = content

    def _read(self, row: FakeRow, start: int) -> None:
        block_size = self.layout.block_size
        for group, table, kv in zip(self.layout.groups, row.tables, self.kv, strict=True):
            if group.is_state:
                continue  # it was looked at before it changed
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, row.computed or 0):
                found = kv.get((table[position // block_size], position % block_size))
                assert found == row.contents[position], f"position {position} of row {row.join.seq_id} is not its own"

    def _results(self, step: Step) -> StepResult:
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        errors: dict[int, str] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for work in (*step.decodes, *step.prefills):
            row = self.rows[work.seq_id]
            if isinstance(work, PrefillChunk) and work.prompt_logprobs is not None:
                targets = [*work.token_ids[1:]] + ([] if work.next_token_id is None else [work.next_token_id])
                prompt_logprobs[work.seq_id] = tuple(
                    TokenLogprobs(target, -float(position)) for position, target in enumerate(targets, work.start)
                )
            row.computed = work.end if isinstance(work, PrefillChunk) else len(row.tokens)
            if isinstance(work, PrefillChunk) and not work.samples:
                continue
            tokens = self._sample(row, work.drafts if isinstance(work, DecodeSlot) else None)
            if isinstance(work, DecodeSlot):
                row.computed += len(tokens) - 1
            if work.seq_id in self.errors:
                errors[work.seq_id] = self.errors[work.seq_id]
                tokens = tokens[:-1]  # the last of them is the one whose logits are not finite
            if tokens:
                sampled[work.seq_id] = tuple(map(SampledToken, tokens))
            row.extend(self._is_isolated(row), *tokens)
        return StepResult(step.step_id, sampled, prompt_logprobs, errors, compute_s=0.25)

    def _sample(self, row: FakeRow, drafts: Drafts | None) -> list[int]:
        """The row's next token, and one more behind each draft that it would have chosen."""
        request, prefix = row.join.request, row.prefixes[-1]
        num_output = len(row.tokens) - len(request.prompt_token_ids)
        guesses, num_holding = (), 0
        if drafts is not None and not drafts.token_ids:
            num_holding = self.num_holding(drafts.most)
        elif drafts is not None and drafts.start <= len(row.tokens):
            guesses = drafts.token_ids[len(row.tokens) - drafts.start :][: drafts.most]
        tokens: list[int] = []
        while True:
            token = sample(prefix, request, row.join.sample_index, num_output + len(tokens), self.vocab_size)
            tokens.append(token)
            prefix = mix(prefix, token)
            holds = len(tokens) <= num_holding or guesses[len(tokens) - 1 : len(tokens)] == (token,)
            if not holds:
                return tokens
