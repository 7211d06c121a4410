"""The host part of a backend, around a forward pass that can be worked out by hand: the next token is the token plus
one, modulo the vocabulary. A token of POISON yields logits that are not finite."""

import threading
import time

import numpy as np
import pytest

from twostroke.backends.host import host_backend
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.sampler import token_logprobs
from twostroke.core.errors import BackendError
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, Drafts, PrefillChunk, RowJoin, Step

VOCAB = 20
POISON = 13
GREEDY = SamplingParams(temperature=0.0)
LAYOUT = KVLayout(block_size=4, groups=(KVGroup((0,), None, 50),))


def logits_after(token_id):
    logits = np.random.default_rng(token_id).random(VOCAB).astype(np.float32)
    logits[(token_id + 1) % VOCAB] = 5.0
    if token_id == POISON:
        logits[3] = np.nan
    return logits


class Successor(HostBackend):
    name = "successor"

    def __init__(self):
        super().__init__(LAYOUT, max_context=40, vocab_size=VOCAB)
        self.batches = []
        self.may_run = threading.Event()
        self.may_run.set()

    def forward(self, batch):
        assert self.may_run.wait(timeout=120)
        self.batches.append(batch)
        return np.array([logits_after(batch.token_ids[row]) for row in batch.logit_rows]).reshape(-1, VOCAB)


@pytest.fixture
def backend():
    backend = Successor()
    yield backend
    backend.may_run.set()
    backend.close()


def join(seq_id, prompt, sampling=GREEDY, **rest):
    return RowJoin(seq_id, Request(f"r{seq_id}", prompt, sampling, seed=seq_id), **rest)


def chosen(result):
    return {seq_id: token.token_id for seq_id, (token,) in result.sampled.items()}


def test_a_sequence_prefills_in_chunks_then_decodes_from_its_row(backend):
    first = Step(0, joins=(join(1, (2, 3, 4)),), prefills=(PrefillChunk(1, 0, (2, 3), samples=False),))
    assert chosen(backend.execute(first)) == {}
    assert chosen(backend.execute(Step(1, prefills=(PrefillChunk(1, 2, (4,), samples=True),)))) == {1: 5}
    for step_id in range(2, 6):
        assert chosen(backend.execute(Step(step_id, decodes=(DecodeSlot(1, step_id + 1),)))) == {1: step_id + 4}
    assert [batch.token_ids.tolist() for batch in backend.batches] == [[2, 3], [4], [5], [6], [7], [8]]


def test_joins_and_leaves_at_any_step_with_both_phases_side_by_side(backend):
    backend.execute(Step(0, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),)))
    mixed = Step(
        1,
        joins=(join(2, (8, 9)), join(3, (15, 16))),
        grants=(BlockGrant(2, 0, 0, (7,)),),
        prefills=(PrefillChunk(2, 0, (8, 9), samples=True), PrefillChunk(3, 0, (15,), samples=False)),
        decodes=(DecodeSlot(1, 1),),
    )
    result = backend.execute(mixed)
    assert result.step_id == 1
    assert chosen(result) == {1: 4, 2: 10}
    assert result.compute_s > 0
    assert backend.batches[-1].tables[0][:, 0].tolist() == [-1, 7, -1]
    last = Step(2, leaves=(1,), prefills=(PrefillChunk(3, 1, (16,), samples=True),), decodes=(DecodeSlot(2, 2),))
    assert chosen(backend.execute(last)) == {2: 11, 3: 17}
    assert len(backend.rows) == 2


def test_a_resumed_row_continues_after_what_it_had_written(backend):
    resumed = join(1, (2, 3), output_token_ids=(4, 5))
    step = Step(0, joins=(resumed,), prefills=(PrefillChunk(1, 0, (2, 3, 4, 5), samples=True),))
    assert chosen(backend.execute(step)) == {1: 6}


def test_a_step_of_leaves_alone_computes_nothing(backend):
    backend.execute(Step(0, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),)))
    result = backend.execute(Step(1, leaves=(1,)))
    assert (chosen(result), len(backend.rows), len(backend.batches)) == ({}, 0, 1)


def test_seeded_rows_draw_the_same_in_any_company(backend):
    sampling = SamplingParams(temperature=5.0)

    def answer(others):
        tokens = []
        joins = tuple(join(seq_id, (2,), sampling) for seq_id in (*others, 50))
        prefills = tuple(PrefillChunk(seq_id, 0, (2,), samples=True) for seq_id in (*others, 50))
        result = backend.execute(Step(0, joins=joins, prefills=prefills))
        for position in range(1, 12):
            tokens.append(result.sampled[50][0].token_id)
            result = backend.execute(
                Step(position, decodes=tuple(DecodeSlot(seq_id, position) for seq_id in (50, *others)))
            )
        backend.execute(Step(99, leaves=(*others, 50)))
        return tokens

    assert answer(()) == answer((51, 52)) == answer((7,))


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_cover_every_known_next_token(backend, count):
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=count)
    first = Step(
        0,
        joins=(join(1, (2, 9, 4, 6, 1), sampling), join(2, (8,))),
        prefills=(
            PrefillChunk(1, 0, (2, 9), samples=False, prompt_logprobs=count, next_token_id=4),
            PrefillChunk(2, 0, (8,), samples=True),
        ),
    )
    result = backend.execute(first)
    assert chosen(result) == {2: 9}
    assert set(result.prompt_logprobs) == {1}
    assert result.prompt_logprobs[1] == tuple(
        token_logprobs(logits_after(before), after, count) for before, after in ((2, 9), (9, 4))
    )
    last = PrefillChunk(1, 2, (4, 6, 1), samples=True, prompt_logprobs=count)
    result = backend.execute(Step(1, prefills=(last,), decodes=(DecodeSlot(2, 1),)))
    assert chosen(result) == {1: 2, 2: 10}
    assert result.prompt_logprobs[1] == tuple(
        token_logprobs(logits_after(before), after, count) for before, after in ((4, 6), (6, 1))
    )


def test_logits_that_are_not_finite_stop_their_own_sequence_alone(backend):
    joins = (join(1, (2,)), join(2, (POISON,)), join(3, (POISON - 1,)))
    prefills = tuple(PrefillChunk(row.seq_id, 0, row.request.prompt_token_ids, samples=True) for row in joins)
    result = backend.execute(Step(0, joins=joins, prefills=prefills))
    assert chosen(result) == {1: 3, 3: POISON}
    assert set(result.errors) == {2}
    # The next step was launched before the error was known; it runs, and the sequence's slot is harmless.
    result = backend.execute(Step(1, decodes=tuple(DecodeSlot(seq_id, 1) for seq_id in (1, 2, 3))))
    assert chosen(result) == {1: 4}
    assert set(result.errors) == {2, 3}


def test_a_chunk_of_prompt_logprobs_that_are_not_finite_is_an_error(backend):
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    step = Step(
        0,
        joins=(join(1, (POISON, 4), sampling), join(2, (POISON, 4, 5), sampling), join(3, (8,))),
        prefills=(
            PrefillChunk(1, 0, (POISON, 4), samples=True, prompt_logprobs=1),
            PrefillChunk(2, 0, (POISON, 4), samples=False, prompt_logprobs=1, next_token_id=5),
            PrefillChunk(3, 0, (8,), samples=True),
        ),
    )
    result = backend.execute(step)
    assert chosen(result) == {3: 9}
    assert set(result.errors) == {1, 2}
    assert result.prompt_logprobs == {}


def test_launched_steps_run_in_order_and_do_not_block_the_caller(backend):
    backend.may_run.clear()
    tickets = [
        backend.launch(Step(0, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),))),
        backend.launch(Step(1, decodes=(DecodeSlot(1, 1),))),
        backend.launch(Step(2, decodes=(DecodeSlot(1, 2),))),
    ]
    assert not any(ticket.ready for ticket in tickets)
    backend.may_run.set()
    assert [chosen(ticket.result()) for ticket in tickets] == [{1: 3}, {1: 4}, {1: 5}]
    assert all(ticket.ready for ticket in tickets)


def test_a_failing_step_raises_at_its_own_ticket(backend):
    broken = backend.launch(Step(0, decodes=(DecodeSlot(404, 1),)))
    sound = backend.launch(Step(1, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),)))
    with pytest.raises(KeyError):
        broken.result()
    assert chosen(sound.result()) == {1: 3}


def test_a_step_lets_the_first_tokens_of_the_one_before_be_taken(backend, monkeypatch):
    monkeypatch.setattr(host_backend, "HAND_OVER_S", 20.0)
    first = backend.launch(Step(0, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),)))
    tickets = [first, *(backend.launch(Step(number, decodes=(DecodeSlot(1, number),))) for number in (1, 2))]
    time.sleep(0.05)
    assert len(backend.batches) == 1, "the second waits for whoever has not taken the first"
    assert [chosen(ticket.result()) for ticket in tickets] == [{1: 3}, {1: 4}, {1: 5}]
    assert chosen(first.result()) == {1: 3}, "a result may be asked for again"


def test_first_tokens_that_nobody_takes_hold_nothing_up_for_long(backend):
    backend.launch(Step(0, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),)))
    assert chosen(backend.launch(Step(1, decodes=(DecodeSlot(1, 1),))).result()) == {1: 4}


def test_close_finishes_what_was_launched_and_takes_no_more():
    backend = Successor()
    ticket = backend.launch(Step(0, joins=(join(1, (2,)),), prefills=(PrefillChunk(1, 0, (2,), samples=True),)))
    backend.close()
    assert ticket.ready
    assert chosen(ticket.result()) == {1: 3}
    with pytest.raises(RuntimeError):
        backend.launch(Step(1))
    assert not any(thread.name.startswith("successor-launch") for thread in threading.enumerate())


def test_a_row_grows_by_what_it_samples_whatever_bound_its_slots_have(backend):
    first = Step(0, joins=(join(1, (2, 3, 4)),), prefills=(PrefillChunk(1, 0, (2, 3, 4), samples=True),))
    backend.execute(first)
    for step_id, bound in ((1, 3), (2, 9), (3, 7)):
        backend.execute(Step(step_id, decodes=(DecodeSlot(1, bound),)))
    assert [batch.positions.tolist() for batch in backend.batches] == [[0, 1, 2], [3], [4], [5]]
    resumed = Step(4, leaves=(1,), joins=(join(2, (2, 3), output_token_ids=(4, 5)),))
    backend.execute(resumed)
    assert backend.rows[2].length == 4


def test_a_step_with_too_many_drafts_is_refused_and_changes_nothing(backend):
    backend.execute(Step(0, joins=(join(1, (2,)),)))
    for drafts in (Drafts(33), Drafts(33, (5, 6), start=1)):
        with pytest.raises(BackendError, match="a slot of 33 drafts, and the successor backend takes 32"):
            backend.launch(Step(1, leaves=(1,), decodes=(DecodeSlot(1, 0, drafts),)))
    assert len(backend.rows) == 1 and not backend.batches
