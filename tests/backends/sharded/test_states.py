"""States that several ranks keep a part of each: with prefixes found again, drafts that hold or do not, preemption and
samples, tokens are those of one process that has none of it. Rank 0 alone knows of these; what they do to states, it
has the others do."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sharded.thread_ranks import ThreadRanks
from tests.engine.test_states import GREEDY, Guessing, Hybrid, Small, conversation, words
from tests.models.tiny_checkpoints import make_tiny

from twostroke import backends
from twostroke.backends.sharded.state_orders import OrderedStates, carry_out, with_orders
from twostroke.core.sampling_params import SamplingParams
from twostroke.models.loading import load_checkpoint

SHARED = [("qwen3_next", "reference", 4), ("nemotron_h", "reference", 4), ("lfm2_moe", "reference", 2)]
SHARED += [("granite_hybrid", "cpu", 2)]


@pytest.fixture(scope="module", params=SHARED, ids=lambda one: " on ".join(map(str, one)))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Hybrid, Hybrid]:
    """One process, and ranks."""
    name, backend, size = request.param
    checkpoint = load_checkpoint(make_tiny(name, tmp_path_factory.mktemp(name))[0])
    factory = backends.load_factory(backend)
    return Hybrid(checkpoint, factory), Hybrid(checkpoint, ThreadRanks(factory, size))  # type: ignore[arg-type]


def test_a_conversation_with_tools(pair: tuple[Hybrid, Hybrid]) -> None:
    alone, ranks = pair
    guessing, found, prompt = Guessing(), 0, words(99, 50)
    with (
        Small(alone, prefix_caching=False, max_context=400) as plain,
        Small(ranks, drafting=guessing, max_context=400) as quick,
    ):
        for turn, said, num_left_out in conversation(5, (3, 20)):
            prompt = prompt + said
            answer = plain.ask(str(turn), prompt)
            guessing.answers = {str(turn): answer}
            assert quick.ask(str(turn), prompt) == answer, turn
            found += quick.heard[str(turn)].timings[0].cached_tokens
            prompt = prompt + answer[num_left_out:]
    assert found > 4 * 50 and guessing.num_drafts > 30


def test_company_preemption_and_samples(pair: tuple[Hybrid, Hybrid]) -> None:
    alone, ranks = pair
    prompts = {name: [*words(7, 30), *words(20 + number, 12)] for number, name in enumerate("abcd")}
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=16, n=3, ignore_eos=True)
    expected = {}
    for name, prompt in prompts.items():
        with Small(alone, prefix_caching=False) as plain:
            plain.ask(name, prompt, seeded if name == "c" else GREEDY)
            expected[name] = plain.heard[name].tokens
    guessing = Guessing(2)
    guessing.answers = {name: list(tokens[0]) for name, tokens in expected.items() if name != "c"}
    with Small(ranks, num_blocks=9, num_states=3, max_running=4, drafting=guessing) as busy:
        for name, prompt in prompts.items():
            busy.add(name, prompt, seeded if name == "c" else GREEDY)
            busy.turn()
        busy.run()
        assert {name: busy.heard[name].tokens for name in prompts} == expected
        counts = busy.engine.scheduler.counts()
        assert counts.preemptions > 0 and counts.prefix_hit_tokens > 0


class Noted:
    """States that say what was done to them."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def copy(self, group: int, source: int, target: int) -> None:
        self.done.append(("copy", group, source, target))

    def save(self, group: int, slot: int, num_drafts: int, target: int) -> None:
        self.done.append(("save", group, slot, num_drafts, target))

    def commit(self, group: int, slot: int, num_drafts: int) -> None:
        self.done.append(("commit", group, slot, num_drafts))

    def drop_aside(self) -> None:
        self.done.append(("drop aside",))


def test_orders_are_carried_out_once_and_in_their_order() -> None:
    own, other = Noted(), Noted()
    ordered = OrderedStates(own)
    ordered.drop_aside()
    ordered.copy(2, 5, 6)
    ordered.save(1, 7, 3, 8)
    ordered.commit(1, 7, 3)
    batch = np.arange(9, dtype=np.int32)
    for _ in range(2):
        message = bytearray(with_orders(ordered.take_orders(), batch.tobytes()))
        np.testing.assert_array_equal(np.frombuffer(carry_out(message, other), dtype=np.int32), batch)
    assert own.done == other.done
    assert own.done == [("drop aside",), ("copy", 2, 5, 6), ("save", 1, 7, 3, 8), ("commit", 1, 7, 3)]
