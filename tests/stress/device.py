"""A backend that runs the hash model over KV in blocks, on a virtual clock. It knows of a running sequence what a real
one knows: its length, its last token and its block tables. Everything else it reads through the tables, so a block that
was swapped, lost or reused too early shows as a wrong token. It fails as told, and notes every order that no backend
could follow: the engine takes what a backend raises for the backend's fault."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.stress.hash_model import first_seen, forward, root_of, sample
from tests.stress.host_blocks import HostBlocks, block_format
from tests.stress.trouble import Trouble, VirtualClock, seconds_of
from twostroke.core.kv_blocks import KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import (
    DecodeSlot,
    Drafted,
    Drafts,
    PrefillChunk,
    RowJoin,
    SampledToken,
    Step,
    StepResult,
    TokenLogprobs,
)

NEVER_WRITTEN = 0xBAD
ROT, ROT_END = 1 << 62, (1 << 62) + (1 << 61)
"""Numbers that are not finite, and the step that found out. They travel with a block wherever it is copied."""
GENERATION_BIT = 32
"""From here on such a number says whose step it was."""
NOT_FINITE = "the logits are not finite"
METHOD = "a guess"
RIGHT, WRONG = -1, -2
"""Guesses that hold whatever the model chooses, and that never do."""


@dataclass
class Row:
    join: RowJoin
    length: int
    """Tokens known: the last enters at the position before."""
    last_token: int
    tables: list[dict[int, int]]
    computed: int | None = None
    """Positions whose KV is written; None: its first chunk has not come, which says where it begins."""
    is_broken: bool = False
    """A step failed with it in it: what it computes is nobody's."""
    joined_after: int = -1
    """The last step that had been applied when it was let in."""
    first_own: int = 0
    """Positions from here on it has computed itself."""
    kept: list[tuple[int, int, int]] = field(default_factory=list)
    """Of its states that were copied elsewhere: group, slot and number."""

    @property
    def num_output(self) -> int:
        return self.length - len(self.join.request.prompt_token_ids)


@dataclass
class Launched:
    """A step on its way back; also its ticket."""

    device: PagedDevice
    step: Step
    outcome: StepResult | Exception
    ends_s: float
    interrupts: bool = False

    @property
    def ready(self) -> bool:
        return not self.interrupts and self.device.clock.now_s >= self.ends_s

    def result(self) -> StepResult:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        self.device.clock.now_s = max(self.device.clock.now_s, self.ends_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class PagedDevice:
    name = "paged"

    def __init__(
        self,
        layout: KVLayout,
        clock: VirtualClock,
        *,
        max_tokens_per_step: int,
        max_drafts: int,
        seed: int,
        bytes_per_s: float = 1e3,
        slowness: float = 1.0,
        generation: int = 0,
    ) -> None:
        """`bytes_per_s`: what copies to and from host memory are said to take. `slowness`: times what steps take.
        `generation`: of the engines that share a disk, which one this is."""
        self._bytes_per_s, self._slowness, self._generation = bytes_per_s, slowness, generation
        self.layout, self.clock, self.max_drafts = layout, clock, max_drafts
        self._max_tokens = max_tokens_per_step
        self._random = random.Random(seed)
        self._free_s = 0.0
        self.rows: dict[int, Row] = {}
        self.kv = [[[NEVER_WRITTEN] * layout.block_size for _ in range(one.num_blocks)] for one in layout.groups]
        """Of a state the first number alone."""
        self._saves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Of the step that is computed, by sequence and length: groups, and slots of theirs."""
        self.host_blocks: HostBlocks | None = None
        """Where there are tiers."""
        self.next_trouble: Trouble | None = None
        self.harmed: dict[int, set[tuple[str, int]]] = {}
        """By step: the samples, as (request, index), that its trouble ends."""
        self.last_applied = -1
        """The last step whose result, or failure, the host knows; whoever plays keeps it."""
        self.let_in: dict[int, int] = {}
        """The same when a sequence was let in whose row is opened later, because its blocks are being loaded."""
        self._has_rot = False
        self.violations: list[str] = []
        self.num_steps = 0
        self._last_step_id = -1

    # The backend's protocol

    @property
    def block_format(self) -> KVFormat:
        return block_format(self.layout)

    def keep_blocks(self, num_slots: Sequence[int]) -> HostBlocks:
        self.host_blocks = HostBlocks(self.layout, self.kv, num_slots, self._bytes_per_s)
        return self.host_blocks

    def read_blocks(self, group: int, block_ids: Sequence[int], into: memoryview) -> None:
        assert self.host_blocks is not None
        into[:] = b"".join(self.host_blocks.read(group, block) for block in block_ids)

    def write_blocks(self, group: int, block_ids: Sequence[int], data: memoryview) -> None:
        raise NotImplementedError("nobody sends it any")

    def launch(self, step: Step) -> Launched:
        trouble, self.next_trouble = self.next_trouble, None
        self.num_steps += 1
        work = (*step.decodes, *step.prefills)
        if trouble in (Trouble.LAUNCH, Trouble.LATE_LAUNCH):
            self.harmed[step.step_id] = {self._name_of(step, item.seq_id) for item in work}
            if trouble is Trouble.LATE_LAUNCH:
                self._begin_in_vain(step)
            raise MemoryError("no room for the step")
        self._check_step(step)
        if self.host_blocks is not None:
            self.host_blocks.copy(step, self._random)
        self._update_rows(step)
        self._restore(step)
        harmed = self._harmed_by(trouble, step)
        if harmed:
            self.harmed[step.step_id] = {self._name_of(step, seq_id) for seq_id in harmed}
        result = StepResult(step.step_id, {}, {}, {}, compute_s=self._seconds(step, trouble), drafted={})
        for item in work:
            fault = trouble if item.seq_id in harmed else self._rot_of(step, item)
            if isinstance(item, DecodeSlot):
                self._decode(item, result, fault)
            else:
                self._prefill(item, result, fault)
        if trouble is Trouble.STRAY:
            result.sampled[-1] = result.sampled[1 << 40] = (SampledToken(3),)  # type: ignore[index]
        self._free_s = max(self.clock.now_s, self._free_s) + result.compute_s
        outcome = RuntimeError("the device is gone") if trouble is Trouble.RESULT else result
        return Launched(self, step, outcome, self._free_s, interrupts=trouble is Trouble.INTERRUPT)

    def close(self) -> None:
        self.rows.clear()

    def _begin_in_vain(self, step: Step) -> None:
        """The copies are made and blocks that the step was granted for its own positions are written to; then it fails.
        As on a card, where kernels are queued one by one."""
        if self.host_blocks is not None:
            self.host_blocks.copy(step, self._random)
        starts = {chunk.seq_id: chunk.start for chunk in step.prefills}
        starts |= {slot.seq_id: self.rows[slot.seq_id].length - 1 for slot in step.decodes if slot.seq_id in self.rows}
        for grant in step.grants:
            start, is_state = starts.get(grant.seq_id), self.layout.groups[grant.group].is_state
            for index, block in enumerate(grant.block_ids, grant.first_index):
                if start is not None and (is_state or index * self.layout.block_size >= start):
                    self._overwrite(grant.group, block)
        for _, group, slot, _ in step.saves:
            self._overwrite(group, slot)

    def _overwrite(self, group: int, block: int) -> None:
        cells = self.kv[group][block]
        cells[:] = [self._random.getrandbits(60) for _ in cells]

    def _harmed_by(self, trouble: Trouble | None, step: Step) -> list[int]:
        """All of a step that fails, else one of those that it can befall."""
        sampling = [slot.seq_id for slot in step.decodes] + [chunk.seq_id for chunk in step.prefills if chunk.samples]
        everybody = [item.seq_id for item in (*step.decodes, *step.prefills)]
        if trouble is Trouble.RESULT:
            return everybody
        may_be = {Trouble.NOT_FINITE: everybody, Trouble.NO_TOKEN: sampling, Trouble.TOO_MANY: sampling}
        candidates = may_be.get(trouble, []) if trouble is not None else []
        return [self._random.choice(candidates)] if candidates else []

    def _seconds(self, step: Step, trouble: Trouble | None) -> float:
        return seconds_of(step.num_tokens) * self._slowness * (100.0 if trouble is Trouble.SLOW else 1.0)

    # Rows

    def _check_step(self, step: Step) -> None:
        work = (*step.decodes, *step.prefills)
        if not 0 < step.num_tokens <= self._max_tokens:
            self._object(f"step {step.step_id} has {step.num_tokens} tokens, and {self._max_tokens} are allowed")
        if step.step_id <= self._last_step_id:
            self._object(f"step {step.step_id} comes after step {self._last_step_id}")
        if len({item.seq_id for item in work}) != len(work):
            self._object(f"step {step.step_id} has two pieces of work for one sequence")
        self._last_step_id = step.step_id

    def _update_rows(self, step: Step) -> None:
        for seq_id in step.leaves:
            if self.rows.pop(seq_id, None) is None:
                self._object(f"row {seq_id} is closed, and was not open")
        for join in step.joins:
            if join.seq_id in self.rows:
                self._object(f"row {join.seq_id} is opened twice")
            tokens = (*join.request.prompt_token_ids, *join.output_token_ids)
            row = Row(join, len(tokens), tokens[-1], [{} for _ in self.layout.groups])
            row.joined_after = self.let_in.pop(join.seq_id, self.last_applied)
            self.rows[join.seq_id] = row
        for grant in step.grants:
            if (row := self.rows.get(grant.seq_id)) is None:
                self._object(f"blocks are granted to row {grant.seq_id}, which is not open")
                continue
            table, num_blocks = row.tables[grant.group], self.layout.groups[grant.group].num_blocks
            for index, block in enumerate(grant.block_ids, grant.first_index):
                if index in table or not 0 <= block < num_blocks:
                    self._object(f"entry {index} of row {grant.seq_id}, group {grant.group}, cannot be block {block}")
                table[index] = block

    def _restore(self, step: Step) -> None:
        """In any order, here in that of the slots."""
        read = {(group, source) for _, group, source, _ in step.restores}
        written = [(group, target) for _, group, _, target in step.restores]
        written += [(group, slot) for _, group, slot, _ in step.saves]
        if len(set(written)) < len(written) or not read.isdisjoint(written):
            self._object(f"copies of states in step {step.step_id} depend on their order")
        for seq_id, group, source, target in sorted(step.restores, key=lambda one: one[2:]):
            if self.rows[seq_id].tables[group].get(0) != target:
                self._object(f"a state of row {seq_id} is restored into slot {target}, which is not its own")
            self.kv[group][target][:] = self.kv[group][source]
        self._saves = {}
        for seq_id, group, slot, length in step.saves:
            self._saves.setdefault((seq_id, length), []).append((group, slot))

    def _save(self, row: Row) -> None:
        """Of a row that has just come to where one of its states is to be kept."""
        for group, slot in self._saves.get((row.join.seq_id, row.computed or 0), ()):
            number = self.kv[group][row.tables[group][0]][0]
            self.kv[group][slot][0] = number
            row.kept.append((group, slot, number))

    def _name_of(self, step: Step, seq_id: int) -> tuple[str, int]:
        joins = [join for join in step.joins if join.seq_id == seq_id]
        join = joins[0] if joins else self.rows[seq_id].join
        return join.request.request_id, join.sample_index

    def _object(self, sentence: str) -> None:
        self.violations.append(sentence)

    # Arithmetic

    def _decode(self, slot: DecodeSlot, result: StepResult, fault: Trouble | None) -> None:
        row = self.rows[slot.seq_id]
        request, start = row.join.request, row.length - 1
        if not row.is_broken and (start > slot.position or row.computed is None or row.computed < start):
            self._object(f"a slot at {slot.position} for row {slot.seq_id}, which stands at {start}")
        tokens, entering, guesses = [], row.last_token, self._guesses(row, slot.drafts)
        for guess in (*guesses, None):
            hidden = self._compute(row, (entering,), start + len(tokens))
            entering = sample(hidden, request, row.join.sample_index, row.num_output + len(tokens))
            tokens.append(entering)
            if guess not in (entering, RIGHT) or entering in request.stop_ids:
                break
        self._spoil(row, start + len(tokens), start + slot.num_queries)  # of drafts that did not hold
        if guesses:
            result.drafted[slot.seq_id] = Drafted(METHOD, len(guesses))  # type: ignore[index]
        self._bring(row, tokens, slot.num_queries, result, fault)
        self._rot(row, fault, result.step_id, start, start + slot.num_queries)

    def _guesses(self, row: Row, drafts: Drafts | None) -> list[int]:
        """The host's, or its own, of which any number is right."""
        if drafts is None:
            return []
        if drafts.token_ids:
            return list(drafts.token_ids[max(0, row.length - drafts.start) :][: drafts.most])
        num_right = self._random.randint(0, drafts.most)
        return [RIGHT] * num_right + [WRONG] * (drafts.most - num_right)

    def _prefill(self, chunk: PrefillChunk, result: StepResult, fault: Trouble | None) -> None:
        row, request = self.rows[chunk.seq_id], self.rows[chunk.seq_id].join.request
        if not row.is_broken and (
            row.computed not in (None, chunk.start) or chunk.samples != (chunk.end == row.length)
        ):
            self._object(
                f"a chunk of {chunk.start} to {chunk.end} for row {chunk.seq_id}, which stands at {row.computed}"
            )
        if row.computed is None:
            row.first_own = chunk.start
        hidden = self._compute(row, chunk.token_ids, chunk.start)
        if chunk.prompt_logprobs is not None:
            follows = (*chunk.token_ids[1:], *(() if chunk.next_token_id is None else (chunk.next_token_id,)))
            told = tuple(TokenLogprobs(token, -float(place)) for place, token in enumerate(follows, chunk.start))
            result.prompt_logprobs[chunk.seq_id] = told  # type: ignore[index]
        tokens = [sample(hidden, request, row.join.sample_index, row.num_output)] if chunk.samples else []
        self._bring(row, tokens, len(tokens), result, fault)
        self._rot(row, fault, result.step_id, chunk.start, chunk.end)

    def _bring(self, row: Row, tokens: list[int], most: int, result: StepResult, fault: Trouble | None) -> None:
        """What the host is told, and where the row stands then."""
        seq_id, wants_logprobs = row.join.seq_id, row.join.request.sampling.logprobs is not None
        row.is_broken |= fault is not None
        told = {Trouble.NO_TOKEN: [], Trouble.TOO_MANY: [*tokens, *range(most)], Trouble.NOT_FINITE: tokens[:-1]}
        sampled = told.get(fault, tokens) if fault is not None else tokens
        if fault is Trouble.NOT_FINITE:
            result.errors[seq_id] = NOT_FINITE  # type: ignore[index]
        if sampled:
            result.sampled[seq_id] = tuple(  # type: ignore[index]
                SampledToken(token, TokenLogprobs(token, -float(place)) if wants_logprobs else None)
                for place, token in enumerate(sampled, row.length)
            )
        if tokens and not row.is_broken:
            row.length += len(tokens)
            row.last_token = tokens[-1]

    def _compute(self, row: Row, tokens: Iterable[int], start: int) -> int:
        """Read through the tables, write through them; returns what the next token is drawn from."""
        hidden, position, root = 0, start, root_of(row.join.request)
        known = [self._known(row, number, start) for number in range(len(self.layout.groups))]
        for position, token in enumerate(tokens, start):
            seen = []
            for group, (first, numbers) in zip(self.layout.groups, known, strict=True):
                if not group.is_state and group.window is not None:
                    numbers = numbers[first_seen(group.window, position) - first :]
                seen.append(tuple(numbers))
            left_behind = forward(root, token, position, seen)
            for group, (_, numbers), number in zip(self.layout.groups, known, left_behind, strict=True):
                if group.is_state:
                    numbers.clear()
                numbers.append(number)
            self._write(row, position, left_behind)
            hidden = left_behind[-1]
        row.computed = position + 1
        self._save(row)
        return hidden

    def _known(self, row: Row, number: int, start: int) -> tuple[int, list[int]]:
        """The numbers of a group that a query at `start` or later may read, and the position of the first."""
        group, table, kv, size = self.layout.groups[number], row.tables[number], self.kv[number], self.layout.block_size
        if group.is_state:
            return 0, [kv[table[0]][0]] if start and 0 in table else []
        first = first_seen(group.window, start)
        numbers: list[int] = []
        for index in range(first // size, -(-start // size)):
            if (block := table.get(index)) is None:
                self._object(f"row {row.join.seq_id} reads entry {index} of group {number}, which it was never granted")
            numbers += [NEVER_WRITTEN] * size if block is None else kv[block]
        begins = first // size * size
        return first, numbers[first - begins : start - begins]

    def _write(self, row: Row, position: int, numbers: list[int], *, states: bool = True) -> None:
        for number, value in enumerate(numbers):
            group, table, kv = self.layout.groups[number], row.tables[number], self.kv[number]
            index, offset = (0, 0) if group.is_state else divmod(position, self.layout.block_size)
            if group.is_state and not states:
                continue
            if (block := table.get(index)) is None:
                self._object(f"row {row.join.seq_id} writes position {position} without a block")
            else:
                kv[block][offset] = value

    def _spoil(self, row: Row, start: int, end: int) -> None:
        """A state is as it was before them."""
        for position in range(start, end):
            self._write(row, position, [self._random.getrandbits(60) for _ in self.layout.groups], states=False)

    # Numbers that are not finite

    def _rot(self, row: Row, fault: Trouble | None, step_id: int, start: int, end: int) -> None:
        """A step that failed may have written anything. Where a sequence's logits are not finite, what it wrote before
        may have been wrong for long: all that nobody else holds by now."""
        if fault not in (Trouble.RESULT, Trouble.NOT_FINITE):
            return
        self._has_rot = True
        rotten = ROT + (self._generation << GENERATION_BIT) + step_id
        for number, slot, content in row.kept:
            if fault is Trouble.NOT_FINITE and self.kv[number][slot][0] == content:
                self.kv[number][slot][0] = rotten
        first = start if fault is Trouble.RESULT else row.first_own
        for number, (group, table) in enumerate(zip(self.layout.groups, row.tables, strict=True)):
            others = {
                block for other in self.rows.values() if other is not row for block in other.tables[number].values()
            }
            for position in range(first, end):
                index, offset = (0, 0) if group.is_state else divmod(position, self.layout.block_size)
                block = table.get(index)
                if block is not None and (block not in others or position >= start):
                    self.kv[number][block][offset] = rotten

    def _rot_of(self, step: Step, work: DecodeSlot | PrefillChunk) -> Trouble | None:
        """Whoever reads what is not finite fails, too. Only those may who were let in before the host knew."""
        row = self.rows[work.seq_id]
        if row.is_broken or not (self._has_rot or (self._generation and self.host_blocks is not None)):
            return None
        start = row.length - 1 if isinstance(work, DecodeSlot) else work.start
        numbers = [number for group in range(len(self.kv)) for number in self._known(row, group, start)[1]]
        found = [number - ROT for number in numbers if ROT <= number < ROT_END]
        if not found:
            return None
        generation, origin = divmod(min(found), 1 << GENERATION_BIT)
        if generation != self._generation or row.joined_after >= origin:
            self._object(
                f"row {work.seq_id} was given what step {origin} of engine {generation} had shown to be rotten"
            )
        self.harmed.setdefault(step.step_id, set()).add(self._name_of(step, work.seq_id))
        return Trouble.NOT_FINITE
