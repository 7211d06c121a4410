from __future__ import annotations

import struct
from hashlib import blake2b

from twostroke.kv.prefix_index import PrefixIndex, PrefixNode


def chain(index: PrefixIndex, *blocks: tuple[int, ...], namespace: str = "") -> list[PrefixNode]:
    nodes = [index.root(namespace)]
    for tokens in blocks:
        nodes.append(index.child(nodes[-1], tokens))
    return nodes[1:]


def enter(index: PrefixIndex, nodes: list[PrefixNode], first_block: int = 0) -> None:
    for block, node in enumerate(nodes, first_block):
        entry = index.find_or_add(node)
        assert entry is not None
        index.place(entry, 0, block)


def test_a_digest_is_keyed_blake2b_over_parent_and_tokens() -> None:
    index = PrefixIndex(1, key=b"secret")
    root = index.root("tenant")
    assert root.digest == blake2b(b"tenant", key=b"secret", digest_size=16).digest()
    expected = blake2b(root.digest + struct.pack("=2q", 5, 70_000), key=b"secret", digest_size=16).digest()
    assert index.child(root, (5, 70_000)).digest == expected


def test_every_index_draws_its_own_secret() -> None:
    one, other = PrefixIndex(1), PrefixIndex(1)
    assert chain(one, (1, 2))[0].digest != chain(other, (1, 2))[0].digest


def test_a_prefix_is_found_by_its_tokens_and_by_nothing_else() -> None:
    index = PrefixIndex(1)
    enter(index, chain(index, (1, 2), (3, 4)))
    first, second = chain(index, (1, 2), (3, 4))
    assert index.find(first) is not None
    assert index.find(second) is not None
    assert index.find(chain(index, (3, 4))[0]) is None, "the same block after another prefix"
    assert index.find(chain(index, (1, 2), (3, 5))[1]) is None
    assert index.find(chain(index, (1, 2), namespace="other")[0]) is None


def test_a_collision_is_a_miss() -> None:
    index = PrefixIndex(1, digest=lambda before, tokens: b"same")
    enter(index, chain(index, (1, 2)))
    assert index.find(chain(index, (1, 2))[0]) is not None
    assert index.find(chain(index, (9, 9))[0]) is None
    assert index.find(chain(index, (1, 2), namespace="other")[0]) is None
    assert index.find_or_add(chain(index, (9, 9))[0]) is None, "the first one keeps its place"
    assert len(index) == 1


def test_a_collision_of_parents_is_a_miss_even_when_the_parent_is_gone() -> None:
    """The block's own tokens and its parent's hash agree; only the tokens before differ."""
    index = PrefixIndex(1, digest=lambda before, tokens: bytes(tokens[-1:]) + b"x")  # of the last token alone
    enter(index, chain(index, (1, 2), (3, 4)))
    index.remove(0, 0)
    impostor = chain(index, (7, 2), (3, 4))[1]
    genuine = chain(index, (1, 2), (3, 4))[1]
    assert impostor.digest == genuine.digest and impostor.parent.digest == genuine.parent.digest  # type: ignore[union-attr]
    assert index.find(impostor) is None
    assert index.find(genuine) is not None


def test_an_entry_goes_with_its_last_block() -> None:
    index = PrefixIndex(2)
    (node,) = chain(index, (1, 2))
    entry = index.find_or_add(node)
    assert entry is not None
    index.place(entry, 0, 7)
    index.place(entry, 1, 3)
    index.remove(0, 7)
    assert entry.blocks == [None, 3]
    assert index.entry_of(0, 7) is None
    assert index.find(node) is entry
    index.remove(1, 3)
    assert index.find(node) is None
    assert len(index) == 0


def test_a_long_chain_is_compared_and_dropped_without_recursion() -> None:
    index = PrefixIndex(1)
    blocks = [(number,) for number in range(20_000)]
    one, other = chain(index, *blocks)[-1], chain(index, *blocks)[-1]
    assert one.same_prefix(other)
    del one, other
