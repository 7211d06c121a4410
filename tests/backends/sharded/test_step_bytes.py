"""Steps that ranks on cards are told: all of a step but what is rank 0's."""

from __future__ import annotations

from dataclasses import replace

from twostroke.backends.sharded.step_bytes import from_bytes, to_bytes
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, StateRestore, StateSave, Step

STEP = Step(
    7,
    prefills=(PrefillChunk(1, 16, (3, 4, 5), True, 2, 9), PrefillChunk(2, 0, (6,), False)),
    decodes=(DecodeSlot(3, 40), DecodeSlot(4, 41)),
    leaves=(8, 9),
    grants=(BlockGrant(1, 0, 1, (5, 6)), BlockGrant(2, 1, 0, ())),
    restores=(StateRestore(1, 2, 3, 4),),
    saves=(StateSave(2, 2, 6, 64),),
)


def test_a_step_arrives_as_it_was() -> None:
    assert from_bytes(bytearray(to_bytes(STEP))) == STEP
    assert from_bytes(to_bytes(Step(0))) == Step(0)


def test_of_rows_that_join_their_lengths_arrive() -> None:
    sampling = SamplingParams(temperature=0.7, logit_bias={3: 1.0})
    join = RowJoin(5, Request("name", (11, 12, 13), sampling, seed=4), 2, (21, 22))
    (found,) = from_bytes(to_bytes(replace(STEP, joins=(join,)))).joins
    assert (found.seq_id, len(found.request.prompt_token_ids), len(found.output_token_ids)) == (5, 3, 2)
    assert found.request.sampling.is_greedy and b"11" not in to_bytes(Step(0, joins=(join,)))
