"""What writers should have, by what was sent to them."""

from __future__ import annotations

from twostroke.kv.prefix_index import PrefixNode, quick_digest
from twostroke.kv.sent import SentPrefixes


def chain(*tokens: int) -> list[PrefixNode]:
    nodes, parent = [], PrefixNode(b"", None, (), "")
    for token in tokens:
        parent = PrefixNode(quick_digest(parent.digest, (token,)), parent, (token,), "")
        nodes.append(parent)
    return nodes


def test_each_writer_has_the_beginnings_that_it_was_sent() -> None:
    sent = SentPrefixes()
    sent.note("a", chain(1, 2, 3))
    sent.note("b", chain(1, 9))
    for nodes, held in ((chain(1, 2, 3, 4), (3, 1)), (chain(1, 9, 3), (1, 2)), (chain(2, 3), (0, 0)), ([], (0, 0))):
        assert (sent.num_blocks("a", nodes), sent.num_blocks("b", nodes)) == held
    assert sent.num_blocks("nobody", chain(1)) == 0


def test_the_latest_are_remembered_and_of_each_its_beginning_longest() -> None:
    sent = SentPrefixes(most_blocks=4, most_writers=2)
    sent.note("a", chain(1, 2, 3))
    sent.note("a", chain(7, 8))
    assert sent.num_blocks("a", chain(7, 8)) == 2 and sent.num_blocks("a", chain(1, 2, 3)) == 2
    sent.note("b", chain(1))
    sent.note("c", chain(1))
    assert [sent.num_blocks(name, chain(1)) for name in "abc"] == [0, 1, 1]
