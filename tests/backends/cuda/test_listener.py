"""Who listens on the device hears of prompts what is heard on the reference: in chunks, beside decodes, behind prefixes
that are found again, and to the last layer's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Sizes, mixed_requests, play
from tests.models.tiny_checkpoints import make_tiny

from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SIZES = Sizes(step_tokens=16, max_rows=4, max_context=48)


@dataclass
class Ear:
    layers: tuple[int, ...]
    heard_states: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By sequence and position  # [layers, hidden]"""

    def heard(self, seq_id: int, start: int, states: Sequence[object]) -> None:
        parts = [torch.as_tensor(part).float().cpu().numpy() for part in states]
        for place, row in enumerate(np.stack(parts, axis=1)):
            assert (seq_id, start + place) not in self.heard_states, "told twice"
            self.heard_states[seq_id, start + place] = row.copy()


@pytest.mark.parametrize(
    "variant", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_5", "gemma4_moe"))]
)
def test_the_device_tells_what_the_reference_tells(variant: str, tmp_path: Path, device: str) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    requests = mixed_requests((21, 37, 9), (3, 1, 2, 1))
    last = checkpoint.spec.num_layers - 1
    ears = [Ear((last, 0)), Ear((last, 0))]
    backends = SIZES.on_device(checkpoint, device, listener=ears[0]), SIZES.on_reference(checkpoint, ears[1])
    told = []
    for backend in backends:
        engine = SIZES.engine(checkpoint, backend)
        told.append(play(engine, requests))
        engine.close()
    assert told[0].tokens == told[1].tokens
    found, expected = (ear.heard_states for ear in ears)
    assert set(found) == set(expected)
    assert {seq_id for seq_id, _ in found} == {0, 1, 2, 3}
    assert (3, 0) not in found or variant == "qwen3_5", "a prefix that was found again is not read again"
    for key, row in found.items():
        np.testing.assert_allclose(row, expected[key], atol=2e-3, err_msg=str(key))


def test_who_listens_changes_no_answer(tmp_path: Path, device: str) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    requests = mixed_requests((18, 5), (2, 1, 1))
    answers = []
    for ear in (None, Ear((0, 1, 2))):
        engine = SIZES.engine(checkpoint, SIZES.on_device(checkpoint, device, listener=ear))
        answers.append(play(engine, requests).tokens)
        engine.close()
    assert answers[0] == answers[1]
