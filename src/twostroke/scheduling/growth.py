"""What streams will still take of KV: blocks of prompts that are being read, and tokens of answers, by the lengths that
were measured. From that, whether there is room for one more. Counts; changes nothing."""

from __future__ import annotations

import math

from twostroke.core.sequence import Sequence
from twostroke.core.service_level import DEFAULT_LEVEL
from twostroke.kv.ledger import KVLedger
from twostroke.kv.matching import PrefixMatch
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.output_lengths import OutputLengths, peak_growth
from twostroke.scheduling.queue import RankedQueue


class Growth:
    def __init__(self, config: SchedulerConfig, ledger: KVLedger) -> None:
        self._config = config
        self._ledger = ledger
        self._lengths = OutputLengths()
        pools = zip(ledger.layout.groups, ledger.pools, strict=True)  # states do not grow: they need no reserve
        self._watermarks = [0 if g.is_state else math.ceil(pool.num_blocks * config.kv_watermark) for g, pool in pools]
        self.has_overrun = False
        """Whether somebody had to stop for others: from then on a class without measured answers counts as well."""

    def shortage(
        self, newcomer: Sequence, match: PrefixMatch, running: RankedQueue[Sequence], num_samples: int = 1
    ) -> tuple[int, ...]:
        """Blocks of each group that are missing to let it in beside these, or all of its samples."""
        target = min(len(newcomer.tokens) + 1, newcomer.max_total_tokens - 1)
        spare = self._spare_blocks(newcomer, running, num_samples)
        if num_samples > 1:
            more = self._ledger.ahead.samples_ahead(newcomer.prompt_len, target, num_samples - 1)
            spare = [left + blocks for left, blocks in zip(spare, more, strict=True)]
        return self._ledger.ahead.shortage(match, target, self._config.chunk_limit, spare)

    def _spare_blocks(self, newcomer: Sequence, running: RankedQueue[Sequence], num_samples: int) -> list[int]:
        """One a group: what must be left free beside a newcomer: what running prefills still have to take, and what
        all streams, its own among them, are expected to grow by; the watermark at least."""
        layout = self._ledger.layout
        growth = layout.blocks_for(self._expected(newcomer, running, num_samples))
        grows = [group.window is None and not group.is_state for group in layout.groups]
        spare = [max(mark, growth * grow) for mark, grow in zip(self._watermarks, grows, strict=True)]
        for sequence in running:
            if sequence.num_computed + sequence.num_in_flight < sequence.prefill_len:
                target = min(sequence.prefill_len + 1, sequence.max_total_tokens - 1)
                ahead = self._ledger.blocks_to_come(sequence, target, self._config.chunk_limit)
                spare = [left + more for left, more in zip(spare, ahead, strict=True)]
        return spare

    def _expected(self, newcomer: Sequence, running: RankedQueue[Sequence], num_samples: int) -> int:
        """Tokens that answers will add to KV at most, if nobody else comes. 0: not known."""
        streams = []
        for sequence in (*running, newcomer):
            if not self.has_overrun and not self._lengths.knows(_level_of(sequence)):
                return 0
            streams.append((len(sequence.tokens) - sequence.timing.cached_tokens, self.more_tokens(sequence)))
        streams += [(0, streams[-1][1])] * (num_samples - 1)  # what they give back is sample 0's, too
        return peak_growth(streams)

    def more_tokens(self, sequence: Sequence) -> int:
        """That it will still write: as its class was measured, and else half as much again."""
        most = sequence.max_total_tokens - len(sequence.tokens)
        more = self._lengths.more(_level_of(sequence), sequence.num_output, most)
        return min(most, 1 + sequence.num_output // 2) if more is None else more

    def note_length(self, sequence: Sequence) -> None:
        """It came to its own end."""
        self._lengths.take(_level_of(sequence), sequence.num_output)


def _level_of(sequence: Sequence) -> str:
    return sequence.request.service_level or DEFAULT_LEVEL
