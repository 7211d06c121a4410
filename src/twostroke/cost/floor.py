"""The least time that physics allows each phase, and a whole step: its arithmetic at the measured peak, its bytes at
the measured bandwidth. Counts only what no implementation can avoid; knows nothing of launches."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add, sub

from twostroke.core.step import Drafted, Step
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape


def prefill_multiply_adds(shape: ModelShape, start: int, num_tokens: int) -> int:
    """To read `num_tokens` from position `start` on. The head runs for the last position alone."""
    if num_tokens <= 0:
        return 0
    return (
        shape.layer_matmul_parameters * num_tokens
        + shape.head_matmul_parameters
        + shape.attention_multiply_adds(start, num_tokens)
    )


def prefill_floor_s(shape: ModelShape, start: int, num_tokens: int, ceilings: Ceilings) -> float:
    """Seconds to read `num_tokens` from position `start` on (what lies before is cached) and give the first token:
    by arithmetic, or by the weights that must be read at least once, whichever takes longer."""
    if num_tokens <= 0:
        return 0.0
    compute_s = prefill_multiply_adds(shape, start, num_tokens) / ceilings.multiply_adds_per_s
    return max(compute_s, shape.weight_bytes_read(num_tokens) / ceilings.read_bytes_per_s)


def decode_floor_s(shape: ModelShape, context_len: int, ceilings: Ceilings) -> float:
    """Seconds to write one token alone, when `context_len` tokens (the one that enters among them) are known: every
    weight that it meets and the KV of that context are read once."""
    weights = shape.weight_bytes_read(1)
    return (weights + shape.kv_bytes_moved(context_len)) / ceilings.read_bytes_per_s


def decode_run_floor_s(
    shape: ModelShape, first_context: int, num_tokens: int, ceilings: Ceilings, num_steps: int | None = None
) -> float:
    """The same for `num_tokens` in a row, the first of them at a context of `first_context`. `num_steps`: in which they
    were written, where drafts held; the contexts of steps are spread evenly over the answer."""
    kv_bytes = sum(
        group.query_key_pairs(first_context - 1, num_tokens) * group.moved_per_position for group in shape.kv_groups
    )
    weights = shape.weight_bytes_read(1)
    run_s = (num_tokens * weights + kv_bytes) / ceilings.read_bytes_per_s
    return run_s if num_steps is None or not num_tokens else run_s * num_steps / num_tokens


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as its cost sees it."""

    chunks: tuple[tuple[int, int], ...] = ()
    """Of each prefill chunk: its first position and its number of tokens."""
    num_sampling_chunks: int = 0
    """Chunks whose last position yields a token: the head runs for those alone."""
    contexts: Sequence[int] = ()
    """Of each decode slot: the tokens known, those that enter among them."""
    queries: Sequence[int] = ()
    """Of each decode slot: the tokens that enter, its own and its drafts. They read its context once, and each has
    logits of its own. Empty: one a slot."""

    @property
    def num_queries(self) -> int:
        """Of all decode slots."""
        return sum(self.queries) if self.queries else len(self.contexts)

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.chunks) + self.num_queries


def work_of(step: Step, drafted: Mapping[int, Drafted] | None = None) -> StepWork:
    """`drafted`: of a step that came back, the drafts that were computed; None: the most that may be. The contexts are
    kept in an array: whoever logs thousands of steps keeps them small."""
    queries: Sequence[int] = ()
    if step.has_drafts and drafted is None:
        queries = [slot.num_queries for slot in step.decodes]
    elif drafted:
        queries = [1 + drafted[slot.seq_id].num_drafts if slot.seq_id in drafted else 1 for slot in step.decodes]
    return StepWork(
        chunks=tuple((chunk.start, len(chunk.token_ids)) for chunk in step.prefills),
        num_sampling_chunks=sum(chunk.samples for chunk in step.prefills),
        contexts=array("q", map(add, [slot.position for slot in step.decodes], queries or repeat(1))),
        queries=queries,
    )


def step_multiply_adds(shape: ModelShape, work: StepWork) -> int:
    attention = sum(shape.attention_multiply_adds(start, num_tokens) for start, num_tokens in work.chunks)
    if work.queries:
        firsts = map(sub, work.contexts, work.queries)
        attention += sum(map(shape.attention_multiply_adds, firsts, work.queries))
    else:
        attention += contexts_multiply_adds(shape, work.contexts)
    num_sampled = work.num_queries + work.num_sampling_chunks
    return shape.layer_matmul_parameters * work.num_tokens + shape.head_matmul_parameters * num_sampled + attention


def contexts_multiply_adds(shape: ModelShape, contexts: Sequence[int]) -> int:
    """Of one query at the end of each context: `attention_multiply_adds`, for all of them together."""
    total, head_width = 0, shape.num_heads * shape.head_dim
    for group in shape.kv_groups:
        if group.latent is None:
            positions = sum(contexts) if group.window is None else sum(map(min, contexts, repeat(group.window)))
            total += group.multiply_adds_per_pair(head_width) * positions
        else:
            total += sum(group.multiply_adds(context - 1, 1, head_width) for context in contexts)
    return total


def contexts_bytes_read(shape: ModelShape, contexts: Sequence[int]) -> int:
    """K and V that a slot at the end of each context reads; of a state, also what it writes. There may be hundreds in
    every step."""
    read = 0
    for group in shape.kv_groups:
        positions = sum(contexts) if group.window is None else sum(map(min, contexts, repeat(group.window)))
        read += group.moved_per_position * positions
    return read


def step_bytes_read(shape: ModelShape, work: StepWork) -> float:
    """The weights that it meets, once, in the form that a step of this size reads; each context; what lies before a
    chunk, once for all its queries. States are written, too, once a slot or chunk."""
    prefixes = sum(group.moved_before(start) for start, _ in work.chunks for group in shape.kv_groups)
    weights = shape.weight_bytes_read(work.num_tokens)
    return weights + contexts_bytes_read(shape, work.contexts) + prefixes


def step_floor_s(shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
    """Seconds of one step with exactly this work: by its bytes or by its arithmetic, whichever takes longer."""
    if work.num_tokens == 0:
        return 0.0
    compute_s = step_multiply_adds(shape, work) / ceilings.multiply_adds_per_s
    return max(compute_s, step_bytes_read(shape, work) / ceilings.read_bytes_per_s)
