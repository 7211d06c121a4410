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
    """Returns the multiply-adds to read `num_tokens` from position `start` on. The head runs for the last position
    alone."""
    if num_tokens <= 0:
        return 0
    return (
        shape.layer_matmul_parameters * num_tokens
        + shape.head_matmul_parameters
        + shape.attention_multiply_adds(start, num_tokens)
    )


def prefill_floor_s(shape: ModelShape, start: int, num_tokens: int, ceilings: Ceilings) -> float:
    """Returns the least seconds to read `num_tokens` from position `start` on and give the first token. What lies
    before is cached. Either arithmetic takes them, or reading the weights once, whichever is longer."""
    if num_tokens <= 0:
        return 0.0
    compute_s = prefill_multiply_adds(shape, start, num_tokens) / ceilings.multiply_adds_per_s
    return max(compute_s, shape.weight_bytes_read(num_tokens) / ceilings.read_bytes_per_s)


def decode_floor_s(shape: ModelShape, context_len: int, ceilings: Ceilings) -> float:
    """Returns the least seconds to write one token alone, when `context_len` tokens, the one that enters included, are
    known. Every weight that it meets and the KV of that context are read once."""
    weights = shape.weight_bytes_read(1)
    return (weights + shape.kv_bytes_moved(context_len)) / ceilings.read_bytes_per_s


def decode_run_floor_s(
    shape: ModelShape, first_context: int, num_tokens: int, ceilings: Ceilings, num_steps: int | None = None
) -> float:
    """Returns the same for `num_tokens` in a row, the first of them at a context of `first_context`. `num_steps` is in
    how many steps they were written, if drafts held. The contexts of steps are spread evenly over the answer."""
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
    """The first position and the number of tokens of each prefill chunk."""
    num_sampling_chunks: int = 0
    """How many chunks yield a token at their last position. The head runs for those alone."""
    contexts: Sequence[int] = ()
    """How many tokens each decode slot's sequence has, those that enter included."""
    queries: Sequence[int] = ()
    """How many tokens enter at each decode slot, its own and its drafts. They read its context once, and each has
    logits of its own. Empty means one for each slot."""

    @property
    def num_queries(self) -> int:
        """How many tokens enter at all decode slots."""
        return sum(self.queries) if self.queries else len(self.contexts)

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.chunks) + self.num_queries


def work_of(step: Step, drafted: Mapping[int, Drafted] | None = None) -> StepWork:
    """Returns the work of a step. `drafted` has the drafts that were computed in a step that came back. None means to
    count the most that may be. The contexts are kept in an array, which is small: logs hold thousands of steps."""
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
    """Returns the sum of `attention_multiply_adds` over one query at the end of each context."""
    total, head_width = 0, shape.num_heads * shape.head_dim
    for group in shape.kv_groups:
        if group.latent is None:
            positions = sum(contexts) if group.window is None else sum(map(min, contexts, repeat(group.window)))
            total += group.multiply_adds_per_pair(head_width) * positions
        else:
            total += sum(group.multiply_adds(context - 1, 1, head_width) for context in contexts)
    return total


def contexts_bytes_read(shape: ModelShape, contexts: Sequence[int]) -> int:
    """Returns the bytes of K and V that slots at the end of these contexts read; for states, also what they write.
    There may be hundreds of contexts in every step."""
    read = 0
    for group in shape.kv_groups:
        positions = sum(contexts) if group.window is None else sum(map(min, contexts, repeat(group.window)))
        read += group.moved_per_position * positions
    return read


def step_bytes_read(shape: ModelShape, work: StepWork) -> float:
    """Returns the bytes that a step reads: the weights that it meets, once, in the form for a step of this size; each
    context; and what lies before a chunk, once for all its queries. States are written, too, once for each slot or
    chunk."""
    prefixes = sum(group.moved_before(start) for start, _ in work.chunks for group in shape.kv_groups)
    weights = shape.weight_bytes_read(work.num_tokens)
    return weights + contexts_bytes_read(shape, work.contexts) + prefixes


def step_floor_s(shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
    """Returns the least seconds of one step with exactly this work: for its bytes or for its arithmetic, whichever
    takes longer."""
    if work.num_tokens == 0:
        return 0.0
    compute_s = step_multiply_adds(shape, work) / ceilings.multiply_adds_per_s
    return max(compute_s, step_bytes_read(shape, work) / ceilings.read_bytes_per_s)
