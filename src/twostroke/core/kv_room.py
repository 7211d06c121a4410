"""How much KV sequences take, and how a memory for KV is cut into blocks and slots. Knows no model and no machine."""

from __future__ import annotations

from twostroke.core.kv_layout import KVGroup, KVGroupNeed, KVLayout
from twostroke.core.step_sizes import StepSizes

STATES_SHARE = 0.25
"""Of the memory for KV, what states may take beside blocks: more short sequences can run then than long ones fit."""
SNAPSHOTS_A_SEQUENCE = 7
"""That there is room for at most, for each sequence that may run: conversations that wait for their next turn are more
than those that are answered."""


def sequence_bytes(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], context: int) -> int:
    """KV that one sequence of this context holds at most."""
    return sum(_group_tokens(sizes, group, context) * group.bytes_per_token for group in groups)


def _group_tokens(sizes: StepSizes, group: KVGroupNeed, context: int) -> int:
    """Tokens of KV that one sequence of this context holds at most: behind a window, blocks are given back. A state
    counts as one."""
    if group.content == "state":
        return 1
    tokens = context
    if group.window is not None:
        tokens = min(context, group.window + 2 * sizes.max_tokens_per_step + sizes.block_size)
    return -(-tokens // sizes.block_size) * sizes.block_size


def fitting_context(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], budget: int, context: int) -> int:
    """The longest context, up to `context`, of which one sequence fits in the budget."""
    low, high = 0, context
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(sizes, groups, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def kv_layout_within(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], budget: int, max_context: int) -> KVLayout:
    """Blocks for as many full-length sequences as the budget holds, up to all that may run, and slots for states."""
    size = sizes.block_size
    one = [_group_tokens(sizes, group, max_context) for group in groups]
    of_one = [tokens * group.bytes_per_token for tokens, group in zip(one, groups, strict=True)]
    state_bytes = sum(taken for taken, group in zip(of_one, groups, strict=True) if group.content == "state")
    one_bytes = sum(of_one) - state_bytes
    slots = _state_slots(sizes, one_bytes, state_bytes, budget) if state_bytes else 0
    sequences = 1.0
    if one_bytes:
        sequences = max(1.0, min(float(sizes.max_running), (budget - slots * state_bytes) / one_bytes))
    return KVLayout(
        block_size=size,
        groups=tuple(
            KVGroup(
                group.layers,
                group.window,
                slots if group.content == "state" else int(sequences * tokens) // size,
                group.content,
                group.values,
                group.model,
            )
            for tokens, group in zip(one, groups, strict=True)
        ),
    )


def _state_slots(sizes: StepSizes, one_bytes: int, state_bytes: int, budget: int) -> int:
    """One for each sequence that may run, and more for snapshots: a share of the budget, or what leaves each sequence
    of full length its part, if that is more. `one_bytes`: what such a sequence takes beside its states."""
    each = 1 + SNAPSHOTS_A_SEQUENCE
    slots = max(STATES_SHARE * budget / state_bytes, each * budget / (one_bytes + each * state_bytes))
    left = (budget - one_bytes) // state_bytes  # one sequence fits in any case
    return max(1, min(int(slots), left, each * sizes.max_running))
