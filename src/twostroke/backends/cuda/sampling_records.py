"""How a row that joins becomes what the device keeps of it: the words of its record, and the lists they point at. Plain
arrays; knows nothing of where they go. The words are those of kernels/sampling_state.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.cuda.kernels import sampling_state as words
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import RowJoin

RECORD_WORDS = int(words.NUM_WORDS.value)
SMALLEST_TEMPERATURE = 1e-300
"""Below 1e-38 all choose alike, and log2(e) over the smallest number would be infinite."""
WORD_MASK = 2**64 - 1
EMPTY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One row's upload. The two addresses in its words are filled in by whoever knows them."""

    words: npt.NDArray[np.int64]  # [RECORD_WORDS]
    lists: npt.NDArray[np.int64]  # bias ids, bias values and stop ids, two 32-bit words in each
    seen_ids: npt.NDArray[np.int64]  # the prompt, where the repetition penalty looks at it
    output_ids: npt.NDArray[np.int64]  # what the row has written, where penalties count it
    has_penalties: bool


def has_filters(sampling: SamplingParams, vocab_size: int) -> bool:
    has_top_k = sampling.top_k is not None and sampling.top_k < vocab_size
    return not sampling.is_greedy and (has_top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def has_edits(sampling: SamplingParams) -> bool:
    has_masks = sampling.min_tokens > 0 or sampling.grammar is not None
    return sampling.has_penalties or bool(sampling.logit_bias) or has_masks


def record_of(join: RowJoin, vocab_size: int) -> RowRecord:
    request, sampling = join.request, join.request.sampling
    record = np.zeros(RECORD_WORDS, dtype=np.int64)
    numbers = record.view(np.float64)
    if not sampling.is_greedy:
        scale = math.log2(math.e) / max(sampling.temperature, SMALLEST_TEMPERATURE)
        numbers[words.SCALE.value] = min(scale, words.LARGEST_SCALE)
        numbers[words.TOP_P.value] = sampling.top_p if sampling.top_p < 1.0 else 0.0
        numbers[words.MIN_P.value] = sampling.min_p
        if sampling.top_k is not None and sampling.top_k < vocab_size:
            record[words.TOP_K.value] = sampling.top_k
    record[words.SEED.value] = np.uint64(request.seed & WORD_MASK).view(np.int64)
    record[words.SAMPLE_INDEX.value] = join.sample_index
    record[words.PROMPT_LEN.value] = len(request.prompt_token_ids)
    record[words.NUM_OUTPUT.value] = len(join.output_token_ids)

    bias_ids = _known(sampling.logit_bias.keys(), vocab_size)
    biases = np.array([sampling.logit_bias[token_id] for token_id in bias_ids.tolist()], dtype=np.float32)
    has_grammar = sampling.grammar is not None  # then its masks keep to min_tokens, where they can
    stop_ids = _known(sorted(request.stop_ids), vocab_size) if sampling.min_tokens and not has_grammar else EMPTY
    record[words.NUM_BIASES.value] = len(bias_ids)
    record[words.NUM_STOPS.value] = len(stop_ids)
    record[words.MIN_TOKENS.value] = sampling.min_tokens if len(stop_ids) else 0
    record[words.HAS_GRAMMAR.value] = has_grammar
    numbers[words.REPETITION.value] = sampling.repetition_penalty
    numbers[words.PRESENCE.value] = sampling.presence_penalty
    numbers[words.FREQUENCY.value] = sampling.frequency_penalty
    looks_at_prompt = sampling.repetition_penalty != 1.0
    return RowRecord(
        record,
        _pairs(bias_ids.astype(np.int32), biases.view(np.int32), stop_ids.astype(np.int32)),
        _known(request.prompt_token_ids, vocab_size) if looks_at_prompt else EMPTY,
        _known(join.output_token_ids, vocab_size) if sampling.has_penalties else EMPTY,
        sampling.has_penalties,
    )


def _known(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids that have a logit: an index beyond them would be a fault on the device, not an exception."""
    known = np.fromiter(ids, dtype=np.int64)
    return known[known < vocab_size]


def _pairs(*lists: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    joined = np.concatenate(lists)
    return np.concatenate([joined, np.zeros(len(joined) % 2, dtype=np.int32)]).view(np.int64)
