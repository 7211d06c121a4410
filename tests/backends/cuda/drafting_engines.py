"""Engines whose drafts are made on the device, watched and helped: so that drafts of random weights hold as well as
not, while all that a drafter reads and makes is its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from tests.backends.cuda.engines import Sizes, play
from tests.backends.cuda.tables import fused_up_to

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.drafting import DeviceDrafter
from twostroke.backends.cuda.head_loading import drafter_of
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.interface import Companion
from twostroke.core.formats import Formats
from twostroke.core.grammar import Grammars
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts, Step, StepResult
from twostroke.engine.engine import Engine
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.models.checkpoint import Checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

F32 = Formats("f32", "f32", "f32")
SIZES = Sizes(step_tokens=64, max_rows=3, max_context=96)
WAYS = {
    "plain": SIZES,
    "chunked": replace(SIZES, step_tokens=16),
    "little KV": replace(SIZES, num_blocks=6),  # all three do not fit side by side
}
PROMPTS = [
    [3 + (17 * place) % 240 for place in range(35)],
    [5, 9, 5, 9, 5],
    [3 + (31 * place) % 250 for place in range(18)],
]


@dataclass
class Room(Drafting):
    """Room for this many drafts in turn, whether they pay or not."""

    turns: tuple[int, ...] = (3, 4, 1, 0, 2)

    def __post_init__(self) -> None:
        self._turns = cycle(self.turns)

    def drafts(self, sequence: Stream, most: int) -> Drafts | None:
        asked = sequence.request.sampling.speculation
        most = min(most, next(self._turns))
        return Drafts(most) if most > 0 and (asked is None or not asked.is_off) else None


@dataclass
class Helped:
    """A drafter whose drafts are looked at, and then made better: some of a row's first ones become what the model will
    say. So drafts hold, by luck and by numbers that differ, while all that it reads and makes is its own."""

    drafter: DeviceDrafter
    parts: Parts
    answers: list[list[int]]
    """All tokens of each request, in the order of their coming; they come again and again."""
    made: list[tuple[list[int], int, list[int]]] = field(default_factory=list)
    """All tokens, how many of them were known, drafts."""

    def __post_init__(self) -> None:
        self._rng = random.Random(7)
        self._draft = self.drafter.draft
        self.drafter.draft = self.draft  # type: ignore[method-assign]

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        self._draft(rows, width, drafts)
        seq_ids = {row: seq_id for seq_id, row in self.parts.rows.index_of.items()}
        records = self.parts.rows.sampling.records
        for line in rows.view(-1, width).tolist():
            row, count = line[0], line.count(line[0]) - 1
            if row not in seq_ids or not count:
                continue
            length = int(records[row, 16] + records[row, 6])
            known = self.answers[seq_ids[row] % len(self.answers)]
            self.made.append((known, length, drafts[row, :count].tolist()))
            right = known[length : length + self._rng.randrange(count + 1)]
            drafts[row, : len(right)] = torch.tensor(right, dtype=torch.int32)


def engine_of(
    checkpoint: Checkpoint,
    companion: Companion,
    sizes: Sizes,
    device: str,
    watch: Callable[[DeviceDrafter, Parts], None] | None = None,
    *,
    drafts: bool = True,
    drafting: Drafting | None = None,
    grammars: Grammars | None = None,
    slots: int = 0,
) -> Engine:
    """`watch` is shown the drafter when it is made. `slots`: of each group in host memory; 0: no tiers."""
    choices = fused_up_to(0, device, torch.float32)
    assert choices is not None
    groups = sizes.layout(checkpoint).groups
    layers = tuple(range(companion.checkpoint.spec.num_layers))
    own = (KVGroup(layers, None, sizes.num_blocks, model=1),) if layers else ()
    layout = KVLayout(sizes.block_size, (*groups, *own))
    make = drafter_of(
        companion,
        checkpoint.spec,
        layout,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        max_context=sizes.max_context,
        choices=choices,
        has_copies=False,
    )

    def drafter(parts: Parts) -> DeviceDrafter:
        made = make(parts)
        if watch is not None:
            watch(made, parts)
        return made

    backend = CudaBackend(
        checkpoint,
        layout,
        device=torch.device(device),
        formats=F32,
        max_context=sizes.max_context,
        max_tokens_per_step=sizes.step_tokens,
        max_running=sizes.max_rows,
        choices=choices,
        drafter=drafter if drafts else None,
    )
    if grammars is not None:
        backend.use_grammars(grammars)
    config = SchedulerConfig(
        max_context=sizes.max_context,
        max_tokens_per_step=sizes.step_tokens,
        max_running=sizes.max_rows,
        snapshot_tokens=sizes.block_size,  # where layers keep states, prefixes are found there
    )
    drafting = (drafting or Room()) if drafts else None
    num_slots = [slots] * len(layout.groups)
    blocks = backend.keep_blocks(num_slots) if slots else None
    tiers = None if blocks is None else KVTiers(HostTier(num_slots), backend.block_format, blocks)
    ledger = KVLedger(layout, tiers=tiers, snapshot_tokens=config.snapshot_tokens)
    scheduler = Scheduler(config, layout, ledger=ledger, drafting=drafting, max_drafts=backend.max_drafts)
    return Engine(scheduler, backend, checkpoint.spec.vocab_size, grammars=grammars)


class Looked:
    """At the drafts of each step once it is done: in graphs nobody can look at them while they are made. For an engine
    that has one step in flight."""

    def __init__(self, engine: Engine) -> None:
        self.made: list[tuple[list[int], int, list[int]]] = []
        """As `Helped.made`."""
        self._known: dict[int, list[int]] = {}
        self._backend = engine.backend
        engine.on_step = self._look

    def _look(self, step: Step, result: StepResult) -> None:
        assert isinstance(self._backend, CudaBackend) and self._backend._verifies is not None
        rows, drafts = self._backend._parts.rows.index_of, self._backend._verifies.drafts
        for join in step.joins:
            self._known[join.seq_id] = [*join.request.prompt_token_ids, *join.output_token_ids]
        for seq_id, drafted in result.drafted.items():
            known = list(self._known[seq_id])
            self.made.append((known, len(known), drafts[rows[seq_id], : drafted.num_drafts].tolist()))
        for seq_id, tokens in result.sampled.items():
            self._known[seq_id] += [token.token_id for token in tokens]


def drafts_made(
    checkpoint: Checkpoint,
    companion: Companion,
    requests: list[Request],
    sizes: Sizes,
    device: str,
    times: int = 2,
    slots: int = 0,
) -> list[tuple[list[int], int, list[int]]]:
    """`slots`: as `engine_of`; then prefixes come back from host memory.

    What a drafter made, in every way that a stream can take; answers were those without it. The requests come again,
    when their prefixes are found. On a card drafts of random weights hardly ever hold: nobody can mend them there."""
    engine = engine_of(checkpoint, companion, SIZES, device, drafts=False)
    plain = play(engine, requests).tokens
    engine.close()
    answers = [[*one.prompt_token_ids, *plain[one.request_id]] for one in requests]
    helped: list[Helped] = []

    def help_it(made: DeviceDrafter, parts: Parts) -> None:
        helped.append(Helped(made, parts, answers))

    engine = engine_of(checkpoint, companion, sizes, device, None if device == "cuda" else help_it, slots=slots)
    looked = None
    if device == "cuda":
        engine.run_ahead(False)
        looked = Looked(engine)
    for time in range(times):
        told = play(engine, [replace(one, request_id=f"{one.request_id} {time}") for one in requests]).tokens
        assert told == {f"{name} {time}": tokens for name, tokens in plain.items()}
    assert (engine.scheduler.counts().tier_hit_tokens.host > 0) == bool(slots)
    engine.scheduler.check()
    engine.close()
    return helped[0].made if looked is None else looked.made
