"""Decides for each request whether its prefix comes back from host memory and disk or is computed again, by what each
is predicted to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Series
from dataclasses import replace

from twostroke.core.sequence import Sequence
from twostroke.core.timing import TierTokens
from twostroke.kv.matching import PrefixMatch, PrefixMatcher
from twostroke.kv.prefix_index import PrefixNode
from twostroke.kv.tiers.tiers import KVTiers


def recalled(matcher: PrefixMatcher, tiers: KVTiers, sequence: Sequence, match: PrefixMatch) -> PrefixMatch | None:
    """See `KVLedger.recall`. `match` is what the device holds."""
    if not len(tiers.host) and tiers.disk is None:
        return match
    with_disk, passed_by = tiers.may_fetch(sequence.seq_id), 0
    while True:
        longer = matcher.match_beyond(sequence, tiers, with_disk=with_disk)
        if with_disk and lacks_blocks(longer, sequence, matcher.block_size) and tiers.look(sequence.seq_id):
            return None  # another process may have written them since
        if longer.num_tokens <= match.num_tokens:
            return _passing_by(match, passed_by)
        pays = tiers.worth.loads(match.num_tokens, longer.num_tokens - match.num_tokens, load_seconds(tiers, longer))
        if not pays:
            passed_by = max(passed_by, longer.num_tokens)
        if not longer.fetches:
            return _passing_by(longer if pays else match, passed_by)
        if pays:
            for load in reversed(longer.loads):
                tiers.host.touch(load.kept)  # so that what comes later does not take their slots soon
                tiers.host.pin(load.kept)  # so that what is fetched does not take their slots
            is_fetched = tiers.fetch(sequence.seq_id, longer.fetches)
            for load in longer.loads:
                tiers.host.unpin(load.kept)
            if is_fetched:
                return None
        with_disk = False


def _passing_by(match: PrefixMatch, end: int) -> PrefixMatch:
    """Returns a match that notes how far, up to `end`, tiers have more that did not pay."""
    return replace(match, num_passed_by=end - match.num_tokens) if end > match.num_tokens else match


def lacks_blocks(match: PrefixMatch, sequence: Sequence, block_size: int) -> bool:
    """Whether some whole blocks of the known tokens are nowhere to be found."""
    return match.num_tokens // block_size < (len(sequence.tokens) - 1) // block_size


def load_seconds(tiers: KVTiers, match: PrefixMatch) -> float:
    """Returns the predicted seconds to bring blocks from disk to host memory, and all of them to the device."""
    fetched = sum(found.record.payload_bytes for _, _, found in match.fetches)
    loaded = sum(tiers.block_bytes[load.group] for load in match.loads)
    return tiers.worth.disk_seconds(fetched) + (fetched + loaded) / tiers.blocks.load_bytes_per_s


def kept_behind(tiers: KVTiers, chain: Series[PrefixNode], num_blocks: int) -> tuple[int, float]:
    """Returns how many blocks of a chain, behind its first `num_blocks`, tiers hold in every group, and the predicted
    seconds to load them. They are found by their names alone, without comparing tokens, which is enough for a price."""
    groups, fetched, loaded, place = range(len(tiers.block_bytes)), 0, 0, num_blocks + 1
    while place < len(chain):
        node = chain[place]
        found = [None if tiers.disk is None else tiers.disk.find(node, group) for group in groups]
        in_memory = [tiers.host.names(node, group) for group in groups]
        if not all(there or on_disk is not None for there, on_disk in zip(in_memory, found, strict=True)):
            break
        fetched += sum(tiers.block_bytes[group] for group in groups if not in_memory[group])
        loaded += sum(tiers.block_bytes)
        place += 1
    return place - 1 - num_blocks, tiers.worth.disk_seconds(fetched) + loaded / tiers.blocks.load_bytes_per_s


def coming_back(
    tiers: KVTiers, sequence: Sequence, chain: Series[PrefixNode], num_shared: int, block_size: int
) -> tuple[int, float]:
    """See `KVLedger.num_coming_back`. `num_shared` is how many of its tokens others hold, too."""
    num_blocks, load_s = kept_behind(tiers, chain, num_shared // block_size)
    num_tokens = min(num_blocks * block_size, len(sequence.tokens) - 1 - num_shared)
    if num_tokens <= 0 or not tiers.worth.loads(num_shared, num_tokens, load_s):
        return num_shared, 0.0
    return num_shared + num_tokens, load_s


def tier_tokens(match: PrefixMatch, block_size: int) -> TierTokens:
    """Returns how many tokens of a match come from each tier. A block counts where its slowest part was."""
    blocks = {load.place: "" for load in match.loads}
    for load in match.loads:
        blocks[load.place] = load.kept.origin or blocks[load.place]
    found = Counter(blocks.values())
    return TierTokens(*(found[origin] * block_size for origin in ("", "disk", "peer")))
