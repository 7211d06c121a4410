"""What it costs to take a running sequence's KV: a promise, perhaps, and the seconds to compute it again."""

from __future__ import annotations

import math

from twostroke.core.sequence import Sequence
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.forecast import Forecast


def loss(sequence: Sequence, forecast: Forecast, ledger: KVLedger, now_s: float) -> tuple[bool, float]:
    """Whether taking its KV breaks a promise, and the seconds to have it again: to compute what nobody else holds of it
    and no tier, and to load the rest. The least loses least."""
    promise = sequence.timing.promise
    num_held, load_s = ledger.num_coming_back(sequence)
    redo_s = load_s + forecast.prefill_s(num_held, len(sequence.tokens))
    if promise is None:
        return False, redo_s
    if sequence.num_output:
        return promise.itl_s is not None and redo_s > promise.itl_s, redo_s
    lost_s = math.inf if promise.ttft_s is None else sequence.request.asked_s + promise.ttft_s - redo_s
    return lost_s < now_s <= lost_s + redo_s - forecast.reading_s(sequence), redo_s
