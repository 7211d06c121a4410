"""A backend without arithmetic. It keeps rows as a real one does, and in place of keys and values it writes the whole
prefix that a key depends on; every step it checks that each key a query may read is the sequence's own. The token it
samples is a function of the prefix alone, so `expected_output` knows what a request must get without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.step import DecodeSlot, PrefillChunk, RowJoin, SampledToken, Step, StepResult, TokenLogprobs

MASK = (1 << 61) - 1


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
    computed: int | None = None

    def extend(self, isolated: bool) -> None:
        request = self.join.request
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

    def __init__(
        self, layout: KVLayout, *, max_context: int, vocab_size: int, max_tokens_per_step: int, caching: bool = True
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
        self.steps: list[Step] = []

    def launch(self, step: Step) -> FakeTicket:
        assert step.num_tokens > 0, "an empty step"
        assert step.num_tokens <= self.max_tokens_per_step, "over the token budget"
        if self.steps:
            assert step.step_id == self.steps[-1].step_id + 1
        self.steps.append(step)
        self._update_rows(step)
        work = (*step.decodes, *step.prefills)
        assert len({item.seq_id for item in work}) == len(work), "a sequence with two pieces of work"
        spans = [self._span(item) for item in work]
        for row, start, end in spans:
            self._write(row, start, end)
        for row, start, end in spans:
            self._read(row, start, end)
        return FakeTicket(self._results(step))

    def close(self) -> None:
        self.rows.clear()

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
        assert work.seq_id in self.rows, f"work for row {work.seq_id}, which is closed"
        row = self.rows[work.seq_id]
        if isinstance(work, DecodeSlot):
            assert work.position == len(row.tokens) - 1, "a slot whose last token is not the row's"
            assert row.computed == work.position, "a slot before its prefill"
            return row, work.position, work.position + 1
        assert work.token_ids and list(work.token_ids) == row.tokens[work.start : work.end]
        assert row.computed is None or row.computed == work.start, "a chunk that does not follow the last one"
        assert work.samples == (work.end == len(row.tokens))
        return row, work.start, work.end

    def _write(self, row: FakeRow, start: int, end: int) -> None:
        assert end < self.max_context
        row.computed = end
        block_size = self.layout.block_size
        for table, kv in zip(row.tables, self.kv, strict=True):
            for position in range(start, end):
                kv[table[position // block_size], position % block_size] = row.contents[position]

    def _read(self, row: FakeRow, start: int, end: int) -> None:
        block_size = self.layout.block_size
        for group, table, kv in zip(self.layout.groups, row.tables, self.kv, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                found = kv.get((table[position // block_size], position % block_size))
                assert found == row.contents[position], f"position {position} of row {row.join.seq_id} is not its own"

    def _results(self, step: Step) -> StepResult:
        sampled: dict[int, SampledToken] = {}
        errors: dict[int, str] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for work in (*step.decodes, *step.prefills):
            row = self.rows[work.seq_id]
            if isinstance(work, PrefillChunk) and work.prompt_logprobs is not None:
                targets = [*work.token_ids[1:]] + ([] if work.next_token_id is None else [work.next_token_id])
                prompt_logprobs[work.seq_id] = tuple(
                    TokenLogprobs(target, -float(position)) for position, target in enumerate(targets, work.start)
                )
            if isinstance(work, DecodeSlot) or work.samples:
                if work.seq_id in self.errors:
                    errors[work.seq_id] = self.errors[work.seq_id]
                    row.tokens.append(0)
                else:
                    sampled[work.seq_id] = SampledToken(self._sample(row))
                    row.tokens.append(sampled[work.seq_id].token_id)
                row.extend(self._is_isolated(row))
        return StepResult(step.step_id, sampled, prompt_logprobs, errors, compute_s=0.25)

    def _sample(self, row: FakeRow) -> int:
        request = row.join.request
        num_output = len(row.tokens) - len(request.prompt_token_ids)
        return sample(row.prefixes[-1], request, row.join.sample_index, num_output, self.vocab_size)
