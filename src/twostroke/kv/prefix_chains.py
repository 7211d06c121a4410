"""The names of each sequence's full blocks: a chain of nodes, hashed once, kept while the sequence lives. Knows who may
share with whom, and where a prompt leaves what was cached; holds no block."""

from __future__ import annotations

from twostroke.core.sequence import Sequence
from twostroke.core.timing import PrefixBreak
from twostroke.kv.prefix_index import PrefixIndex, PrefixNode
from twostroke.kv.prefix_memory import PrefixMemory


class PrefixChains:
    def __init__(
        self, index: PrefixIndex, memory: PrefixMemory | None, block_size: int, *, prefix_caching: bool
    ) -> None:
        self._index, self._memory, self._block_size = index, memory, block_size
        self._prefix_caching = prefix_caching
        self._root: PrefixNode | None = None  # the last one used: most requests share a namespace
        self._chains: dict[int, list[PrefixNode]] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def of(self, sequence: Sequence) -> list[PrefixNode]:
        """Root, then one node a full block that was named so far. Tokens are only ever appended, so names are kept."""
        chain = self._chains.get(sequence.seq_id)
        if chain is None:
            namespace = self._namespace(sequence)
            if self._root is None or self._root.namespace != namespace:
                self._root = self._index.root(namespace)
            chain = self._chains[sequence.seq_id] = [self._root]
        return chain

    def extend(self, chain: list[PrefixNode], sequence: Sequence) -> None:
        """Name one more block."""
        start = (len(chain) - 1) * self._block_size
        tokens = tuple(sequence.tokens[start : start + self._block_size])
        last, memory = chain[-1], self._memory
        chain.append(self._index.child(last, tokens, None if memory is None else memory.name_behind(last, tokens)))

    def forget(self, sequence: Sequence) -> None:
        self._chains.pop(sequence.seq_id, None)

    def prefix_break(self, sequence: Sequence, num_matched: int) -> PrefixBreak | None:
        """Where a prompt left what is cached, and why; None where it did not, or was not to be found."""
        block_size = self._block_size
        first, num_full = num_matched // block_size, (sequence.prompt_len - 1) // block_size
        if first >= num_full or self._memory is None or not self.is_shared(sequence):
            return None
        chain, lost = self.of(sequence), first
        while lost < num_full:
            if lost + 1 == len(chain):
                self.extend(chain, sequence)
            if not self._memory.was_evicted(chain[lost + 1]):
                break
            lost += 1
        if lost > first:
            return PrefixBreak(first * block_size, "evicted", (lost - first) * block_size)
        return self._memory.where_it_leaves(chain[first], sequence.tokens, first * block_size, block_size)

    def _namespace(self, sequence: Sequence) -> str:
        """Who may share: requests of one salt, or the samples of one request only."""
        if self.is_shared(sequence):
            return f"salt:{sequence.request.cache_salt}"
        return f"request:{sequence.seq_id - sequence.sample_index}"  # the id of sample 0: never used again

    def is_shared(self, sequence: Sequence) -> bool:
        """Whether other requests may find its prefixes."""
        return self._prefix_caching and sequence.request.sampling.prompt_logprobs is None
