"""Masks on the device against a plain loop, and what is sampled under them against the host's sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.backends.cuda.test_sampling import BLOCK, FILTERS, PENALTIES, SMALL, VOCAB, stream

from twostroke.backends.cuda.grammar_rows import GrammarRows, Masks
from twostroke.backends.cuda.kernels.sampling_edits import mask
from twostroke.backends.cuda.sampling import SamplingRows
from twostroke.backends.host.sampler import RowSampler
from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import RowJoin, SampledToken, StepResult

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

Allowed = npt.NDArray[np.bool_]


def packed(allowed: Allowed, num_bytes: int) -> bytes:
    bits = np.packbits(allowed, bitorder="little").tobytes()
    return bits.ljust(num_bytes, b"\0")


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 256, 1003])
def test_tokens_whose_bit_is_0_are_masked_and_no_others(vocab: int, device: str) -> None:
    rng = np.random.default_rng(vocab)
    scores = rng.standard_normal((5, vocab)).astype(np.float32)
    scores[3, 0] = np.nan
    entries = [3, 0, 4]
    allowed = rng.random((3, vocab)) < 0.5
    num_words = (vocab + 31) // 32
    words = np.frombuffer(b"".join(packed(row, 4 * num_words) for row in allowed), dtype=np.int32)
    expected = scores.copy()
    for entry, row in zip(entries, allowed, strict=True):
        for token_id in range(vocab):
            if not row[token_id] and not np.isnan(scores[entry, token_id]):
                expected[entry, token_id] = -np.inf
    edited = torch.tensor(scores, device=device)
    mask(
        edited,
        torch.tensor(entries, dtype=torch.int32, device=device),
        torch.tensor(words.reshape(3, num_words), device=device),
        block=256,
    )
    np.testing.assert_array_equal(edited.cpu().numpy(), expected)


class Script:
    """A matcher whose masks are written down: the next for each token."""

    def __init__(self, masks: Sequence[bytes]) -> None:
        self._masks, self._seen = masks, 0

    def allowed(self) -> bytes:
        return self._masks[self._seen]

    def advance(self, token_id: int) -> None:
        self._seen += 1


class Scripts:
    """A spec's text is the number of its script."""

    def __init__(self, scripts: Sequence[Sequence[bytes]]) -> None:
        self._scripts = scripts

    def check(self, spec: GrammarSpec) -> None:
        pass

    def matcher(self, spec: GrammarSpec) -> Script:
        return Script(self._scripts[int(spec.text)])


class Done:
    """The ticket of a step whose result is known."""

    ready = True

    def __init__(self, sampled: dict[int, tuple[SampledToken, ...]]) -> None:
        self._result = StepResult(0, sampled)

    def result(self) -> StepResult:
        return self._result


def allow(*token_ids: int) -> Allowed:
    allowed = np.zeros(VOCAB, dtype=np.bool_)
    allowed[list(token_ids)] = True
    return allowed


HALF = np.random.default_rng(8).random(VOCAB) < 0.5
MASKS = {
    "one": allow(700),
    "few": allow(3, 31, 32, 511, 512, 1001, 1002),
    "a block alone": np.arange(VOCAB) // BLOCK == 1,
    "half": HALF,
    "all": np.ones(VOCAB, dtype=np.bool_),
}
SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.0, "logit_bias": {5: 100.0, 31: 9.0}, **PENALTIES},
    {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (3, 31, 700)},
    {"min_tokens": 9, "stop_token_ids": (700, 511)},
    *(FILTERS[name] for name in ("top_k", "more_than_a_list", "top_p", "min_p", "k_and_p", "all")),
]


def test_a_masked_row_samples_what_the_host_samples(device: str) -> None:
    """Every kind of sampling side by side, a step for every kind of mask, and a row without a grammar among them."""
    batch = len(SAMPLINGS) + 1
    scripts = Scripts([[packed(allowed, 0) for allowed in MASKS.values()]])
    spec = GrammarSpec("regex", "0")
    joins = [
        RowJoin(seq_id, Request("r", (1, 2, 3), SamplingParams(**sampling, grammar=spec), seed=seq_id))  # type: ignore[arg-type]
        for seq_id, sampling in enumerate(SAMPLINGS)
    ]
    joins.insert(2, RowJoin(90, Request("free", (1,), SamplingParams(), seed=4)))
    rows, grammars = SamplingRows(batch, VOCAB, device, block=BLOCK, **SMALL), GrammarRows(VOCAB)  # type: ignore[arg-type]
    grammars.use(scripts)
    for row, join in enumerate(joins):
        rows.open(row, join)
        grammars.open(join)
    rows.flush()
    hosts = [
        RowSampler(join.request, 0, (), VOCAB, None if join.seq_id == 90 else scripts.matcher(spec)) for join in joins
    ]
    seq_ids = [join.seq_id for join in joins]
    row_ids = torch.arange(batch, dtype=torch.int32, device=device)
    out, last = (torch.zeros(batch + size, dtype=torch.int32, device=device) for size in (0, 1))
    for step, allowed in enumerate(MASKS.values()):
        logits = stream(step, batch)
        masks = grammars.masks(seq_ids)
        assert masks is not None and masks.entries.tolist() == [0, 1, *range(3, batch)]
        on_device = torch.tensor(logits, device=device)
        rows.sample(on_device, row_ids, last, out, rows.features(range(batch)), masks)
        ours = out.tolist()
        theirs = [host.sample(row).token_id for host, row in zip(hosts, logits, strict=True)]
        assert ours == theirs
        assert all(allowed[token] for row, token in enumerate(ours) if row != 2)
        assert torch.equal(on_device.cpu(), torch.tensor(logits)), "logprobs are of the logits as they were"
        ticket = Done({seq_id: (SampledToken(token),) for seq_id, token in zip(seq_ids, ours, strict=True)})
        grammars.expect(seq_ids, ticket)


def test_a_masked_row_that_is_not_finite_is_seen_to_be_broken(device: str) -> None:
    """Also where only a masked token's logit is not."""
    rows = SamplingRows(2, VOCAB, device, block=BLOCK, **SMALL)  # type: ignore[arg-type]
    sampling = SamplingParams(grammar=GrammarSpec("regex", "0"))
    for row in range(2):
        rows.open(row, RowJoin(row, Request("r", (1,), sampling)))
    rows.flush()
    logits = stream(1, 2)
    logits[1, 9] = -np.inf
    words = np.frombuffer(packed(MASKS["one"], 128) * 2, dtype=np.int32).reshape(2, -1)
    out, last = (torch.zeros(size, dtype=torch.int32, device=device) for size in (2, 3))
    row_ids = torch.arange(2, dtype=torch.int32, device=device)
    masks = Masks(np.arange(2, dtype=np.int32), words)
    rows.sample(torch.tensor(logits, device=device), row_ids, last, out, rows.features([0, 1]), masks)
    assert out.tolist() == [700, -1]
