"""Every family from every kind of quantised folder: its tensors are those of the floats that are meant, whatever the
family has fused, stacked, convolved or put in another order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.models.quantised.published import PUBLISHERS, publish
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.stored_forms import ScaledTensor

_NEVER_PACKED = ("norm", "conv", "decay", "dt_bias", "skip", "embedding", "output", "bias", "sinks", "router")


@pytest.mark.parametrize("variant", variants())
def test_tensors_are_those_that_are_meant(variant: str, tmp_path: Path) -> None:
    plain, _ = make_tiny(variant, tmp_path / "plain")
    for name, publisher in PUBLISHERS.items():
        quantised, meant = (load_checkpoint(folder) for folder in publish(plain, tmp_path / name, publisher))
        assert quantised.tensors.keys() == meant.tensors.keys()
        for own, tensor in meant.tensors.items():
            found = quantised.tensors[own]
            np.testing.assert_array_equal(found.to_float32(), tensor.to_float32(), err_msg=f"{name} {own}")
            if isinstance(found, ScaledTensor):
                assert not own.rpartition(".")[2].endswith(_NEVER_PACKED), own
        packed = [own for own, tensor in quantised.tensors.items() if isinstance(tensor, ScaledTensor)]
        assert len(packed) >= quantised.spec.num_layers
