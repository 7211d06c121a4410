"""An EAGLE-3 head inside an engine on the device: answers are those without it, and what it drafts, in every way that a
stream can take, is what the published order of its arithmetic gives for the whole text from the beginning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.counting import counted, counting_head, counting_model
from tests.backends.cuda.engines import Sizes, play, request
from tests.backends.cuda.tables import fused_up_to
from tests.models.heads.published import PublishedHead
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.eagle3 import Eagle3Drafter
from twostroke.backends.cuda.head_loading import head_of
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.interface import Companion
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.step import Drafts, Step, StepResult
from twostroke.engine.companions import plan_head
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

F32 = Formats("f32", "f32", "f32")
SIZES = Sizes(step_tokens=64, max_rows=3, max_context=96)
TAPS = (1, 2, 3)
PROMPTS = [
    [3 + (17 * place) % 240 for place in range(35)],
    [5, 9, 5, 9, 5],
    [3 + (31 * place) % 250 for place in range(18)],
]
WAYS = {
    "plain": SIZES,
    "chunked": replace(SIZES, step_tokens=16),
    "little KV": replace(SIZES, num_blocks=6),  # all three do not fit side by side
}


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
class Made:
    """A target as transformers runs it, with a head for it."""

    checkpoint: Checkpoint
    model: Any
    head: PublishedHead
    companion: Companion

    def chain(self, known: Sequence[int], count: int) -> list[int]:
        """What the head guesses behind these tokens: hidden states by transformers, the whole text at once."""
        with torch.no_grad():
            read = self.model(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
            joined = self.head.join(torch.cat([read.hidden_states[tap][0] for tap in TAPS], dim=-1))
            embedding = self.model.get_input_embeddings().weight
            states, entered = list(joined), list(known[1:])
            for _ in range(count):
                hidden, scores = self.head(embedding[torch.tensor(entered)], torch.stack(states))
                states.append(hidden[-1])
                entered.append(int(self.head.target_ids[int(scores[-1].argmax())]))
        return entered[len(known) - 1 :]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("llama", tmp_path_factory.mktemp("llama"))


def make(variant: str, folder: Path) -> Made:
    path, model = make_tiny(variant, folder / "target", num_hidden_layers=4)
    torch.manual_seed(5)
    head = PublishedHead(norm_before_residual=True)
    checkpoint = load_checkpoint(path)
    loaded = load_eagle3(head.save(folder / "head"), checkpoint.spec)
    return Made(checkpoint, model, head, plan_head(loaded, 1, REFERENCE).companion)


@dataclass
class Helped:
    """A head whose drafts are looked at, and then made better: some of a row's first ones become what the model will
    say. So drafts hold, by luck and by numbers that differ, while all that the head reads and makes is its own."""

    head: Eagle3Drafter
    parts: Parts
    answers: list[list[int]]
    """All tokens of each request, in the order of their coming; they come again and again."""
    made: list[tuple[list[int], int, list[int]]] = field(default_factory=list)
    """All tokens, how many of them were known, drafts."""

    def __post_init__(self) -> None:
        self._rng = random.Random(7)
        self._draft = self.head.draft
        self.head.draft = self.draft  # type: ignore[method-assign]

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
    watch: Callable[[Eagle3Drafter, Parts], None] | None = None,
    *,
    drafts: bool = True,
) -> Engine:
    """`watch` is shown the head when it is made."""
    choices = fused_up_to(0, device, torch.float32)
    assert choices is not None
    groups = sizes.layout(checkpoint).groups
    layout = KVLayout(sizes.block_size, (*groups, KVGroup((0,), None, sizes.num_blocks, model=1)))
    make_head = head_of(companion, layout, max_context=sizes.max_context, choices=choices, has_copies=False)

    def drafter(parts: Parts) -> Eagle3Drafter:
        head = make_head(parts)
        if watch is not None:
            watch(head, parts)
        return head

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
    config = SchedulerConfig(
        max_context=sizes.max_context, max_tokens_per_step=sizes.step_tokens, max_running=sizes.max_rows
    )
    scheduler = Scheduler(config, layout, drafting=Room() if drafts else None, max_drafts=backend.max_drafts)
    return Engine(scheduler, backend, checkpoint.spec.vocab_size)


def requests_of(**sampling: Any) -> list[Request]:
    return [request(f"r{index}", prompt, max_tokens=12, **sampling) for index, prompt in enumerate(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_answers_are_those_without_and_drafts_those_of_the_whole_text(made: Made, way: str, device: str) -> None:
    """Drafts hold or not, prompts come in chunks, prefixes are found again, streams give way."""
    if device == "cuda":
        pytest.skip("what is drafted in a graph cannot be looked at")
    requests = requests_of()
    engine = engine_of(made.checkpoint, made.companion, SIZES, device, drafts=False)
    plain = play(engine, requests).tokens
    engine.close()
    answers = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain.values(), strict=True)]
    helped: list[Helped] = []
    engine = engine_of(
        made.checkpoint,
        made.companion,
        WAYS[way],
        device,
        lambda head, parts: helped.append(Helped(head, parts, answers)),
    )
    for time in ("first", "again"):
        told = play(engine, [replace(one, request_id=f"{one.request_id} {time}") for one in requests]).tokens
        assert list(told.values()) == list(plain.values())
    engine.close()
    assert len(helped[0].made) >= 20
    for known, length, drafts in helped[0].made:
        assert drafts == made.chain(known[:length], len(drafts)), length


def test_drafts_that_hold_are_counted_and_answers_stay(device: str) -> None:
    """Also on a card, in graphs: a model that counts, and a head that knows the next token, if its vocabulary does."""
    sizes = replace(SIZES, step_tokens=12, num_blocks=5)
    engine = engine_of(counting_model(), counting_head(), sizes, device)
    prompts = [list(range(20)), [3, 9]]
    requests = [request(f"r{index}", prompt, max_tokens=14) for index, prompt in enumerate(prompts)]
    requests.append(request("off", [8, 8, 8], max_tokens=3, speculation=NO_DRAFTS))
    held = []
    apply = engine.scheduler.apply

    def watch(step: Step, result: StepResult, *rest: Any, **named: Any) -> Any:
        held.extend((drafted, result.sampled[seq_id]) for seq_id, drafted in result.drafted.items())
        return apply(step, result, *rest, **named)

    engine.scheduler.apply = watch  # type: ignore[method-assign]
    told = play(engine, requests)
    engine.close()
    assert told.tokens == {
        one.request_id: counted(list(one.prompt_token_ids), one.sampling.max_tokens or 0) for one in requests
    }
    assert len(held) >= 6 and {drafted.method for drafted, _ in held} == {"eagle3"}
    for drafted, came in held:
        assert 1 <= drafted.num_drafts <= 4
        assert len(came) == 1 + bool(came[0].token_id % 5), "the first draft holds where the head knows the token"
    assert engine.backend.unseen.doubt is None  # type: ignore[attr-defined]
