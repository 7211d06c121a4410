"""What a head takes of the memory is planned for: its weights, its keys and values, and the states at blocks' ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.speculation.tiny import BLOCK_SIZE, FACTORIES, Sizes, make_backend, make_checkpoint
from tests.speculation.tiny_heads import make_head

from twostroke.backends.host.eagle3 import Eagle3Network
from twostroke.backends.host.head_drafter import SlotDrafter
from twostroke.engine.companions import plan_head

SIZES = Sizes()


def test_what_is_held_for_each_token_is_what_was_planned(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    head = make_head("eagle3", checkpoint.spec)
    plan = plan_head(head, 1, FACTORIES["reference"])
    (drafter,) = make_backend("reference", checkpoint, SIZES, draft_model=head).companion_drafters
    assert isinstance(drafter, SlotDrafter) and isinstance(drafter._network, Eagle3Network)
    held = drafter._network._layer._keys.nbytes + drafter._network._layer._values.nbytes + drafter._block_ends.nbytes
    assert plan.kv_needs[0].bytes_per_token == held / (SIZES.num_blocks * BLOCK_SIZE)
    assert plan.weight_bytes == sum(tensor.to_float32().nbytes for tensor in head.tensors.values())


@pytest.mark.parametrize("backend", FACTORIES)
def test_medusa_heads_keep_nothing_of_a_token(tmp_path: Path, backend: str) -> None:
    assert plan_head(make_head("medusa", make_checkpoint(tmp_path).spec), 1, FACTORIES[backend]).kv_needs == ()
