"""How much KV sequences take, and how a memory for KV is cut into blocks and slots. Knows no model and no machine."""

from __future__ import annotations

from twostroke.core.kv_layout import KVGroup, KVGroupNeed, KVLayout
from twostroke.core.step_sizes import StepSizes

STATES_SHARE = 0.25
"""The share of the KV memory that states may take beside blocks. More short sequences can then run than long ones would
fit."""
SNAPSHOTS_A_SEQUENCE = 7
"""There is room for at most this many snapshots for each sequence that may run. Conversations that wait for their next
turn outnumber those that are being answered."""


def sequence_bytes(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], context: int) -> int:
    """Returns how many bytes of KV one sequence of this context holds at most."""
    return sum(_group_tokens(sizes, group, context) * group.bytes_per_token for group in groups)


def _group_tokens(sizes: StepSizes, group: KVGroupNeed, context: int) -> int:
    """Returns how many tokens' KV one sequence of this context holds at most: blocks that lie before a window are given
    back. A state counts as one."""
    if group.content == "state":
        return 1
    tokens = context
    if group.window is not None:
        tokens = min(context, group.window + 2 * sizes.max_tokens_per_step + sizes.block_size)
    return -(-tokens // sizes.block_size) * sizes.block_size


def fitting_context(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], budget: int, context: int) -> int:
    """Returns the longest context, up to `context`, at which one sequence fits in the budget."""
    low, high = 0, context
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(sizes, groups, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def kv_layout_within(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], budget: int, max_context: int) -> KVLayout:
    """Returns a layout with blocks for as many full-length sequences as the budget holds, up to all that may run, and
    with slots for states."""
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
    """Returns how many slots for states there are: one for each sequence that may run, and more for snapshots. They
    take a share of the budget, or as much as leaves each sequence of full length its part, if that is more. `one_bytes`
    is what such a sequence takes beside its states."""
    each = 1 + SNAPSHOTS_A_SEQUENCE
    slots = max(STATES_SHARE * budget / state_bytes, each * budget / (one_bytes + each * state_bytes))
    left = (budget - one_bytes) // state_bytes  # one sequence fits in any case
    return max(1, min(int(slots), left, each * sizes.max_running))
