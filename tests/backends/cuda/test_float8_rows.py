"""Models whose weights are in float8 where a card multiplies them by rows in float8, each with a scale. A row's numbers
then have four significant bits, so that a model says something else than the reference, and how much of it is rounding
cannot be told from its end. So each product is held closely against rows rounded the same way, and whole models against
the reference on average. A host computes the same in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, play, request
from tests.backends.cuda.packed_case import activated
from tests.backends.cuda.tables import by_library
from tests.backends.cuda.test_low_bit_model import brought_back
from tests.backends.cuda.test_stored_model import rounded
from tests.models.quantised.folders import FORMATS, make_quantised, quantise_folder
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.compile_ahead import is_rehearsal
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.backends.cuda.kernels.eight_bits import E4M3, LARGEST, LEAST_SCALE, EightBitMatrix
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.product_launches import LAUNCHES, Call
from twostroke.core.formats import STORED
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

PRODUCT_TOLERANCE = 1e-2
"""Of the norm: tensor cores add float8 up in some 14 bits, and a number between two may be rounded to either. Scales
that are off by 3%, or those of another row, are further away, and so is another order of inputs."""
MEAN_TOLERANCE = 0.3
"""Of log-probabilities, over all tokens of all prompts. Rounding makes 0.06 to 0.2 of it in these models, products by
another row's scale 0.33 to 1.2, inputs in another order 1.3 to 2.6."""
SIZES = Sizes()

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not target_of("cuda").has_float8, reason="needs a card that multiplies float8"
)


@dataclass(frozen=True)
class Model:
    checkpoint: Checkpoint
    seen: Checkpoint
    """The same weights as floats."""
    weights: str
    """What its matrices are brought to as they are loaded."""

    def on(self, device: str) -> CudaBackend:
        choices = by_library(device, torch.float32, in_float8=True)
        return SIZES.on_device(self.checkpoint, device, torch.float32, weights=self.weights, choices=choices)


def brought(variant: str, path: Path) -> Model:
    checkpoint = load_checkpoint(make_tiny(variant, path)[0])
    return Model(checkpoint, brought_back(checkpoint, "fp8"), "fp8")


def stored(name: str, path: Path) -> Model:
    checkpoint = load_checkpoint(make_quantised(name, path)[0])
    return Model(checkpoint, rounded(checkpoint), STORED)


def stored_experts(name: str, path: Path) -> Model:
    """Whose attention alone is multiplied in float8: experts meet rows as they are."""
    sizes = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    plain = make_tiny("qwen3_moe", path / "plain", **sizes)[0]
    checkpoint = load_checkpoint(quantise_folder(plain, path, FORMATS[name])[0])
    return Model(checkpoint, rounded(checkpoint), STORED)


@pytest.fixture(
    params=[
        (brought, "llama_bias"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                (brought, "llama"),
                (brought, "gemma2"),
                (stored, "fp8_tensor"),
                (stored, "ct_fp8_channel"),
                (stored_experts, "fp8_tensor"),
                (stored_experts, "ct_fp8_channel"),
            )
        ),
    ],
    ids=lambda case: f"{case[0].__name__}-{case[1]}",
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    made: Callable[[str, Path], Model] = request.param[0]
    return made(request.param[1], tmp_path)


def as_multiplied(call: Call) -> torch.Tensor:
    """What a product must give, in float32: of rows rounded to float8 by their largest, in the inputs' own order."""
    weight, rows = call.matrix.low_bit, call.x.float()
    assert isinstance(weight, EightBitMatrix)
    scales = (rows.abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    sums = (rows / scales).to(E4M3).float() * scales @ weight.dequantised().T
    return activated(sums if call.matrix.bias is None else sums + call.matrix.bias, call.gated)


def test_every_product_of_a_model_is_that_of_rows_in_float8(
    model: Model, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts and of decodes. Nothing is captured, since a replay asks nobody."""
    multiply, errors = LAUNCHES["scaled"], list[tuple[str, int, float]]()

    def compared(call: Call) -> None:
        expected = as_multiplied(call)
        multiply(call)
        if not is_rehearsal():
            error = (call.out.float() - expected).norm() / expected.norm().clamp(min=1e-6)
            errors.append((call.matrix.name, len(call.x), float(error)))

    monkeypatch.setitem(LAUNCHES, "scaled", compared)
    monkeypatch.setattr(GraphCache, "prepare", lambda self, key, work, sample: None)
    monkeypatch.setattr(GraphCache, "run", lambda self, key, work: work())
    play(SIZES.engine(model.checkpoint, model.on(device)), mixed_requests([5, 17, 30], [4, 3, 3, 2], ignore_eos=True))
    names, counts = {name for name, _, _ in errors}, {rows for _, rows, _ in errors}
    assert len(names) > 1 and min(counts) <= SIZES.max_rows < max(counts)
    wrong = [one for one in errors if not one[2] < PRODUCT_TOLERANCE]
    assert not wrong, f"{len(wrong)} of {len(errors)} products, {wrong[:4]} among them"


def logprobs(answers: Answers) -> np.ndarray:
    return np.array([one.logprob for told in answers.prompt_logprobs.values() for one in told])


def test_a_model_says_about_what_the_reference_says(model: Model, device: str) -> None:
    """Both read what our model wrote: so nothing hangs on one word. What it said of its words as it wrote them, one at
    a time, is held too."""
    requests = mixed_requests([5, 17, 30], [4, 3, 3, 2], ignore_eos=True, logprobs=0)
    ours = SIZES.engine(model.checkpoint, model.on(device))
    written = play(ours, requests)
    read_again = [
        request(
            one.request_id, [*one.prompt_token_ids, *written.tokens[one.request_id]], max_tokens=1, prompt_logprobs=0
        )
        for one in requests
    ]
    found = play(ours, read_again)
    expected = play(SIZES.engine(model.seen, SIZES.on_reference(model.seen)), read_again)
    assert np.abs(logprobs(found) - logprobs(expected)).mean() < MEAN_TOLERANCE
    apart = [
        abs(mine.logprob - other.logprob)
        for name, told in written.logprobs.items()
        for mine, other in zip(told, expected.prompt_logprobs[name][-len(told) :], strict=True)
    ]
    assert 1e-4 < np.mean(apart) < MEAN_TOLERANCE, "in float8 little is exact"
