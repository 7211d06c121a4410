"""A prompt's blocks from engine to engine, by their names in this one's prefix index: which of them go when a prompt
was read for another engine, and which are still wanted when another has read one for this. Slots and transfers are
`tiers/peers.py`'s."""

from __future__ import annotations

from collections.abc import Sequence as Series

from twostroke.core.handoff import Handoff
from twostroke.core.kv_layout import KVLayout
from twostroke.core.sequence import Sequence
from twostroke.kv.matching import PrefixMatcher
from twostroke.kv.prefix_chains import PrefixChains
from twostroke.kv.prefix_index import PrefixIndex, PrefixNode
from twostroke.kv.tiers.peers import Peers, Place
from twostroke.kv.tiers.tiers import KVTiers


class Handing:
    def __init__(
        self,
        layout: KVLayout,
        index: PrefixIndex,
        chains: PrefixChains,
        matcher: PrefixMatcher,
        tiers: KVTiers,
        peers: Peers,
    ) -> None:
        self._layout, self._index, self._chains, self._matcher = layout, index, chains, matcher
        self._tiers, self._peers = tiers, peers

    # What goes

    def copy(self, sequence: Sequence, tables: Series[Series[int | None]]) -> None:
        """What is computed of a prompt that another engine will take: while its next chunk is."""
        if sequence.sample_index:
            return  # the first sample has read it for all
        block_size, lease_id = self._layout.block_size, sequence.request.lease_id
        lease = self._peers.lease(lease_id)
        if lease is None:
            num_wanted = (sequence.prompt_len - 1) // block_size  # the other one has a token left to read
            first = [self._matcher.first_needed(group, num_wanted * block_size) for group in self._layout.groups]
            lease = self._peers.begin(lease_id, first, num_wanted)
        nodes = self._nodes(sequence, min(sequence.num_computed // block_size, lease.num_wanted))
        self._peers.take(lease, nodes, tables)

    def end(self, sequence: Sequence, tables: Series[Series[int | None]] | None, *, went_well: bool) -> Handoff | None:
        """It is over: what the other engine is told; None: nothing is kept for it. `tables`: where it still holds its
        blocks."""
        if sequence.sample_index:
            return None
        if went_well and tables is not None:
            self.copy(sequence, tables)
        lease, timing = self._peers.lease(sequence.request.lease_id), sequence.timing
        if lease is None:
            return None
        if not went_well:
            self._peers.drop(lease.lease_id)
            return None
        return self._peers.grant(lease, timing.ttft_s or 0.0, timing.queue_s or 0.0)

    def _nodes(self, sequence: Sequence, num_blocks: int) -> list[PrefixNode]:
        chain = self._chains.of(sequence)
        while len(chain) <= num_blocks:
            self._chains.extend(chain, sequence)
        return chain[1 : num_blocks + 1]

    # What comes

    def fetch(self, sequence: Sequence) -> None:
        """Another engine read its prompt: begin to take what is not here, where that is faster than to read it.
        `KVTiers.is_fetching` says until when."""
        handoff, peers, timing = sequence.request.handoff, self._peers, sequence.timing
        if handoff is None:
            return
        why_not = self._misfit(sequence, handoff)
        wanted = [] if why_not else self._wanted(sequence, handoff)
        if not wanted:
            peers.refuse(handoff, timing, why_not or "all of it is cached here")
            return
        num_held = self._matcher.match(sequence).num_tokens
        took_s = peers.seconds(sum(self._tiers.block_bytes[group] for _, (group, _) in wanted))
        if not self._tiers.worth.loads(num_held, handoff.num_tokens - num_held, took_s):
            peers.refuse(handoff, timing, "to read it here should be faster")
            return
        self._tiers.fetch_from_peer(sequence.seq_id, handoff, wanted, timing)

    def _misfit(self, sequence: Sequence, handoff: Handoff) -> str | None:
        """Why these bytes cannot be this prompt's KV here, in a sentence."""
        block_size, groups = self._layout.block_size, self._layout.groups
        if handoff.layout != self._peers.layout:
            return "the other engine has another model, another format of KV or another version"
        num_blocks = handoff.num_tokens // block_size
        if handoff.num_tokens % block_size or not 0 < handoff.num_tokens < sequence.prompt_len:
            return f"{handoff.num_tokens} tokens are no whole blocks of a prompt of {sequence.prompt_len}"
        needed = [num_blocks - self._matcher.first_needed(group, handoff.num_tokens) for group in groups]
        if [len(slots) for slots in handoff.slots] != needed:
            return "it has not the blocks that these tokens take"
        return None

    def _wanted(self, sequence: Sequence, handoff: Handoff) -> list[tuple[PrefixNode, Place]]:
        num_blocks, found = handoff.num_tokens // self._layout.block_size, []
        for index, node in enumerate(self._nodes(sequence, num_blocks)):
            entry = self._index.find(node)
            for group, slots in enumerate(handoff.slots):
                place = index - num_blocks + len(slots)
                is_here = entry is not None and entry.blocks[group] is not None
                if place >= 0 and not is_here and self._tiers.host.find(node, group) is None:
                    found.append((node, (group, slots[place])))
        return found
