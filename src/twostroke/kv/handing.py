"""A prompt's blocks from engine to engine, by their names in this one's prefix index: which of them go when a prompt
was read for another engine, and which are still wanted when another has read one for this. Slots and transfers are
`tiers/peers.py`'s."""

from __future__ import annotations

from collections.abc import Sequence as Series
from functools import partial

from twostroke.core.handoff import ALL_CACHED, ENDED, Handoff, HandoffRecord, unread
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.sequence import Sequence
from twostroke.kv.matching import PrefixMatcher
from twostroke.kv.prefix_chains import PrefixChains
from twostroke.kv.prefix_index import PrefixIndex, PrefixNode
from twostroke.kv.sent import SentPrefixes
from twostroke.kv.tiers.early import Told
from twostroke.kv.tiers.peers import Lease, Peers, Wanted
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.transport import Bell

SPARE_TOKENS = 128
"""Of a window, that are handed on beyond what blocks of this engine's size need: enough for blocks of 64 tokens."""


NOT_KEPT = "the engine that read it had nothing to hand over, or no room to keep it in"


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
        self._sent = SentPrefixes()

    @property
    def bell(self) -> Bell:
        """Can be read while other engines have told something that `KVTiers.settle` takes in."""
        return self._peers.transport.bell

    # What goes

    def would_move(self, sequence: Sequence) -> float | None:
        """The predicted seconds of a transfer of all that another engine would take of this prompt; None: it is too
        short for that."""
        num_wanted, formats = self._num_wanted(sequence), self._peers.formats.groups
        if not num_wanted:
            return None
        num_bytes = 0
        for group, form in zip(self._layout.groups, formats, strict=True):
            num_bytes += (num_wanted - self._first(group, num_wanted)) * form.num_bytes
        return self._peers.seconds(num_bytes)

    def num_at_writer(self, sequence: Sequence) -> int:
        """Of its tokens, those that whoever will write should have, as far as is known."""
        if not sequence.request.writer:
            return 0
        nodes = self._nodes(sequence, self._num_wanted(sequence))
        return self._sent.num_blocks(sequence.request.writer, nodes) * self._layout.block_size

    def leave(self, sequence: Sequence, why: str) -> None:
        """It is not read here: whoever will write reads it, and has it then."""
        self._peers.note_left()
        sequence.handoff = unread(why)
        self._note_sent(sequence)

    def _note_sent(self, sequence: Sequence) -> None:
        if sequence.request.writer:
            self._sent.note(sequence.request.writer, self._nodes(sequence, self._num_wanted(sequence)))

    def _num_wanted(self, sequence: Sequence) -> int:
        """Whole blocks of a prompt that are of use to another engine, which has a token left to read."""
        return (sequence.prompt_len - 1) // self._layout.block_size

    def copy(self, sequence: Sequence, tables: Series[Series[int | None]]) -> None:
        """What is computed of a prompt that another engine will take: while its next chunk is."""
        if sequence.sample_index:
            return  # the first sample has read it for all
        groups, block_size, lease_id = self._layout.groups, self._layout.block_size, sequence.request.lease_id
        lease = self._peers.lease(lease_id)
        if lease is None:
            num_wanted = self._num_wanted(sequence)
            first, tenant = [self._first(group, num_wanted) for group in groups], sequence.request.tenant
            lease = self._peers.begin(lease_id, first, num_wanted, tenant)
        nodes = self._nodes(sequence, min(sequence.num_computed // block_size, lease.num_wanted))
        self._peers.take(lease, nodes, partial(self._block, tables))
        self._tell(sequence, lease)

    def _tell(self, sequence: Sequence, lease: Lease) -> None:
        """Whoever will write may take what is in host slots already, as far as that engine has not."""
        early, writer = self._peers.early_offers, sequence.request.writer
        if lease.told is None and (listener := early.listener(writer)) is not None:
            num_there = self._sent.num_blocks(writer, self._nodes(sequence, lease.num_wanted)) if writer else 0
            lease.told = Told(listener, num_there, counts=[0] * len(lease.kept))
        early.grown(lease)

    def _block(self, tables: Series[Series[int | None]], group: int, index: int, node: PrefixNode) -> int | None:
        """Where it lies on the device. A sequence's own state has gone on: of states it is the snapshot behind it."""
        if self._layout.groups[group].is_state:
            entry = self._index.find(node)
            return None if entry is None else entry.blocks[group]
        return tables[group][index] if index < len(tables[group]) else None

    def _first(self, group: KVGroup, num_wanted: int) -> int:
        """The first block that may be wanted. Whoever has longer blocks takes less of the prompt, in whole blocks: of a
        window it needs some before those that are read here."""
        position = num_wanted * self._layout.block_size
        return self._matcher.first_needed(group, position if group.window is None else max(0, position - SPARE_TOKENS))

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
        self._note_sent(sequence)
        read_s, queue_s = timing.ttft_s or 0.0, timing.queue_s or 0.0
        return self._peers.grant(lease, read_s, queue_s) or unread(NOT_KEPT, read_s, queue_s)

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
        if handoff.unread:
            timing.handoff = HandoffRecord("", 0, 0, 0.0, handoff.read_s, handoff.queue_s, handoff.unread)
            return
        wanted, why_not = self._worth_taking(sequence, handoff)
        if why_not is not None:
            peers.refuse(handoff, timing, why_not)
            return
        self._tiers.fetch_from_peer(sequence.seq_id, handoff, wanted, timing)

    def knows_model(self, handoff: Handoff) -> bool:
        """Whether the engine that read the prompt has the model that is here."""
        return handoff.model == self._peers.model

    def end_unfetched(self, sequence: Sequence) -> None:
        """Its first token ended the answer: its KV is of no use."""
        assert sequence.request.handoff is not None
        self._peers.refuse(sequence.request.handoff, sequence.timing, ENDED)

    def expected(self, sequence: Sequence) -> tuple[int, float] | None:
        """What `fetch` would bring: the tokens that need not be read then, and the predicted seconds; None: nothing."""
        handoff = sequence.request.handoff
        if handoff is None or handoff.unread:
            return None
        wanted, why_not = self._worth_taking(sequence, handoff)
        if why_not is not None:
            return None
        return self._num_tokens(handoff), self._peers.seconds_of(handoff, wanted)

    def _worth_taking(self, sequence: Sequence, handoff: Handoff) -> tuple[list[Wanted], str | None]:
        """What is not here yet, and why none of it is to be taken."""
        why_not = self._misfit(sequence, handoff)
        wanted = [] if why_not else self._wanted(sequence, handoff)
        if not wanted:
            return [], why_not or ALL_CACHED
        num_held = self._matcher.match(sequence).num_tokens
        took_s = self._peers.seconds_of(handoff, wanted)
        if not self._tiers.worth.loads(num_held, self._num_tokens(handoff) - num_held, took_s):
            return [], "to read it here should be faster"
        return wanted, None

    def _num_tokens(self, handoff: Handoff) -> int:
        """In those."""
        return self._num_blocks(handoff) * self._layout.block_size

    def _num_blocks(self, handoff: Handoff) -> int:
        """Whole blocks of this engine's that it has."""
        return handoff.num_tokens // self._layout.block_size

    def _misfit(self, sequence: Sequence, handoff: Handoff) -> str | None:
        """Why these bytes cannot become this prompt's KV here, in a sentence."""
        peers, theirs, own = self._peers, handoff.formats.block_size, self._layout.block_size
        if sequence.request.sampling.prompt_logprobs is not None:
            return "log-probabilities of its tokens are asked for, and those are told by whoever reads it"
        if handoff.model != peers.model:
            return "the other engine has another model, other weights or another version"
        if not peers.fits(handoff) and (why := peers.converter.misfit(handoff.formats)) is not None:
            return why
        if handoff.num_tokens % theirs or not 0 < handoff.num_tokens < sequence.prompt_len:
            return f"{handoff.num_tokens} tokens are no whole blocks of a prompt of {sequence.prompt_len}"
        if not (num_blocks := self._num_blocks(handoff)):
            return f"{handoff.num_tokens} tokens are less than a block of {own}"
        for group, slots in zip(self._layout.groups, handoff.slots, strict=False):
            if group.is_state and handoff.num_tokens % own:
                return f"its states are those behind {handoff.num_tokens} tokens, which are no whole blocks of {own}"
            first = self._matcher.first_needed(group, num_blocks * own) * own
            least = 1 if group.is_state else (handoff.num_tokens - first // theirs * theirs) // theirs
            most = 1 if group.is_state else handoff.num_tokens // theirs
            if not least <= len(slots) <= most or len(set(slots)) < len(slots):
                return "it has not the blocks that these tokens take"
        return None if len(handoff.slots) == len(self._layout.groups) else "it has KV of another number of groups"

    def _wanted(self, sequence: Sequence, handoff: Handoff) -> list[Wanted]:
        num_blocks, found = self._num_blocks(handoff), []
        first = [
            self._matcher.first_needed(group, num_blocks * self._layout.block_size) for group in self._layout.groups
        ]
        for index, node in enumerate(self._nodes(sequence, num_blocks)):
            entry = self._index.find(node)
            for group in range(len(handoff.slots)):
                is_here = entry is not None and entry.blocks[group] is not None
                if index >= first[group] and not is_here and self._tiers.host.find(node, group) is None:
                    found.append(self._one_wanted(handoff, node, group, index))
        return found

    def _one_wanted(self, handoff: Handoff, node: PrefixNode, group: int, index: int) -> Wanted:
        slots, theirs, own = handoff.slots[group], handoff.formats.block_size, self._layout.block_size
        if self._layout.groups[group].is_state:
            return Wanted(node, group, slots)
        before = handoff.num_tokens // theirs - len(slots)  # blocks that it has not
        first, last = index * own // theirs, ((index + 1) * own - 1) // theirs
        return Wanted(node, group, slots[first - before : last - before + 1], index * own - first * theirs)
