"""A Step as bytes, for ranks on cards, which launch it too. Of a row that joins they are told how long it is: what it
holds, and how it is sampled, is rank 0's."""

from __future__ import annotations

import json

from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, StateRestore, StateSave, Step

_GREEDY = SamplingParams(temperature=0.0)
_ANY_TOKEN = 0


def to_bytes(step: Step) -> bytes:
    """Of one without drafts and without copies to other tiers."""
    assert not (step.has_drafts or step.spills or step.loads)
    told = (
        step.step_id,
        [
            (one.seq_id, one.start, one.token_ids, one.samples, one.prompt_logprobs, one.next_token_id)
            for one in step.prefills
        ],
        [(slot.seq_id, slot.position) for slot in step.decodes],
        [(join.seq_id, len(join.request.prompt_token_ids), len(join.output_token_ids)) for join in step.joins],
        step.leaves,
        [(grant.seq_id, grant.group, grant.first_index, grant.block_ids) for grant in step.grants],
        step.restores,
        step.saves,
    )
    return json.dumps(told, separators=(",", ":")).encode()


def from_bytes(data: bytes | bytearray) -> Step:
    step_id, prefills, decodes, joins, leaves, grants, restores, saves = json.loads(data)
    return Step(
        step_id,
        prefills=tuple(_chunk(*one) for one in prefills),
        decodes=tuple(DecodeSlot(*one) for one in decodes),
        joins=tuple(_join(*one) for one in joins),
        leaves=tuple(leaves),
        grants=tuple(BlockGrant(seq_id, group, first, tuple(ids)) for seq_id, group, first, ids in grants),
        restores=tuple(StateRestore(*one) for one in restores),
        saves=tuple(StateSave(*one) for one in saves),
    )


def _chunk(
    seq_id: int, start: int, token_ids: list[int], samples: bool, logprobs: int | None, next_id: int | None
) -> PrefillChunk:
    return PrefillChunk(seq_id, start, tuple(token_ids), samples, logprobs, next_id)


def _join(seq_id: int, prompt_len: int, output_len: int) -> RowJoin:
    request = Request(str(seq_id), (_ANY_TOKEN,) * prompt_len, _GREEDY)
    return RowJoin(seq_id, request, output_token_ids=(_ANY_TOKEN,) * output_len)
