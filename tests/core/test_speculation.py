"""What a request may say of drafts: as an object, a mapping or a name, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import MAX_DRAFTS, SpeculationParams, check_speculation


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (None, None),
        ("auto", None),
        ("off", SpeculationParams("off")),
        ("ngram", SpeculationParams("ngram")),
        ({}, SpeculationParams()),
        ({"method": "auto", "max_drafts": 3}, SpeculationParams(None, 3)),
        ({"method": "ngram", "max_drafts": None}, SpeculationParams("ngram")),
        (SpeculationParams("ngram", 2), SpeculationParams("ngram", 2)),
    ],
)
def test_a_name_or_a_mapping_will_do(said: Any, meant: SpeculationParams | None) -> None:
    sampling = SamplingParams(speculation=said)
    assert sampling.speculation == meant
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    assert decoded == sampling  # as it travels to the engine's process


@pytest.mark.parametrize(
    ("said", "because"),
    [
        (5, "speculation must be a method's name, 'off', or method and max_drafts, not 5"),
        ("", "method must be a name"),
        ({"method": 5}, "method must be a name"),
        ({"num_drafts": 5}, "speculation has method and max_drafts, and no 'num_drafts'"),
        ({"max_drafts": -1}, f"max_drafts must be an integer from 0 to {MAX_DRAFTS}, not -1"),
        ({"max_drafts": MAX_DRAFTS + 1}, "max_drafts must be"),
        ({"max_drafts": True}, "max_drafts must be"),
        ({"max_drafts": 1.0}, "max_drafts must be"),
        pytest.param({"max_drafts": 10**5000}, "max_drafts must be", id="a number too long to write"),
    ],
)
def test_what_is_none_is_refused(said: Any, because: str) -> None:
    with pytest.raises(BadRequestError, match=r"^speculation") as refused:
        SamplingParams(speculation=said)
    assert because in str(refused.value)


def test_a_method_must_be_one_that_the_engine_has() -> None:
    for asked in (None, SpeculationParams(), SpeculationParams("off"), SpeculationParams("ngram")):
        check_speculation(asked, ("suffix", "ngram"))
    with pytest.raises(BadRequestError, match=r"'eagle3' is not one .* started with \(of suffix, ngram\)"):
        check_speculation(SpeculationParams("eagle3"), ("suffix", "ngram"))
    with pytest.raises(BadRequestError, match=r"\(none, as this engine drafts nothing\)"):
        check_speculation(SpeculationParams("ngram"), ())
    check_speculation(SpeculationParams("off"), ())
