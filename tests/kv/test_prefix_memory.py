"""Why a prompt's prefix was not found: through the ledger, as admission asks."""

from __future__ import annotations

from tests.scheduling.loop import layout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence, SequenceState
from twostroke.core.timing import PrefixBreak
from twostroke.kv.ledger import KVLedger
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.prefix_memory import PrefixMemory

FIRST = tuple(range(100, 120))


class Reader:
    """Reads prompts through a ledger of blocks of 4 tokens, one after the other."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.ledger = KVLedger(layout((None, num_blocks)))
        self._next_id = 0

    def read(self, *tokens: int, salt: str = "", prompt_logprobs: int | None = None) -> PrefixBreak | None:
        request = Request("r", tokens, SamplingParams(prompt_logprobs=prompt_logprobs), cache_salt=salt)
        sequence = Sequence(self._next_id, request, 0, 1000)
        self._next_id += 1
        match = self.ledger.match(sequence)
        found = self.ledger.prefix_break(sequence, match)
        self.ledger.begin(sequence, match)
        sequence.state = SequenceState.RUNNING
        assert self.ledger.reserve(sequence, len(tokens)) is not None
        sequence.num_computed = len(tokens)
        self.ledger.commit(sequence)
        self.ledger.release(sequence)
        self.ledger.retire(sequence)
        self.ledger.check([])
        return found


def test_what_was_never_read_is_new_and_what_is_all_there_is_no_break() -> None:
    reader = Reader()
    assert reader.read(*FIRST) == PrefixBreak(0, "new")
    assert reader.read(*FIRST) is None
    assert reader.read(*FIRST, 1, 2, 3, 4, 5) == PrefixBreak(20, "new")  # the earlier prompt ended there
    assert reader.read(*range(50, 70)) == PrefixBreak(0, "new")  # another prompt altogether


def test_the_token_where_it_leaves_an_earlier_prompt() -> None:
    reader = Reader()
    reader.read(*FIRST)
    # Token 6 differs, and the 13 after it are the same.
    assert reader.read(*FIRST[:6], 1, *FIRST[7:], 9) == PrefixBreak(6, "differs", 13)
    assert reader.read(2, *FIRST[1:], 9) == PrefixBreak(0, "differs", 18)  # as in the latest, token 6 was another
    assert reader.read(*FIRST[:16], 7, 8, 9, 10, 11) == PrefixBreak(16, "differs", 0)


def test_what_had_to_go_was_evicted_and_comes_back() -> None:
    reader = Reader(num_blocks=7)
    reader.read(*FIRST)
    reader.read(*range(50, 66))
    assert reader.read(*FIRST, 1) == PrefixBreak(12, "evicted", 8)  # tails go before heads
    assert reader.read(*FIRST, 1) is None


def test_tenants_and_uncached_requests_learn_nothing_of_others() -> None:
    reader = Reader()
    reader.read(*FIRST, salt="one")
    assert reader.read(*FIRST, 1, salt="two") == PrefixBreak(0, "new")
    assert reader.read(*FIRST, 1, salt="one", prompt_logprobs=1) is None


def test_what_is_cleared_is_forgotten() -> None:
    reader = Reader()
    reader.read(*FIRST)
    reader.ledger.clear_prefixes()
    assert reader.read(*FIRST) == PrefixBreak(0, "new")


def test_memory_is_bounded() -> None:
    index, memory = PrefixIndex(1), PrefixMemory(limit=8)
    node = root = index.root("")
    for number in range(100):
        node = index.child(node, (number, 0, 0, 0))
        memory.saw(node)
        memory.lost(node)
    assert len(memory._children) == len(memory._evicted) == 8
    assert memory.where_it_leaves(root, [1, 2, 3, 4, 5], 0, 4) == PrefixBreak(0, "new")
