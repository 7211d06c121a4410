"""Routing, where a whole model's logits would not show it: ties, and shares that are not scaled."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.routing import route
from twostroke.models.spec import MoeSpec

LOGITS = np.log(np.array([[1, 4, 2, 3], [5, 1, 5, 5]], dtype=np.float32))


def test_the_likeliest_first_and_of_equals_the_lower() -> None:
    chosen, shares = route(MoeSpec(4, 2, 32, normalise_weights=False), LOGITS)
    assert chosen.tolist() == [[1, 3], [0, 2]]
    np.testing.assert_allclose(shares, [[0.4, 0.3], [5 / 16, 5 / 16]], rtol=1e-6)


def test_shares_scaled_to_one() -> None:
    chosen, shares = route(MoeSpec(4, 3, 32, normalise_weights=True), LOGITS)
    assert chosen.tolist() == [[1, 3, 2], [0, 2, 3]]
    np.testing.assert_allclose(shares, [[4 / 9, 3 / 9, 2 / 9], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)
