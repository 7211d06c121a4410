from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def chi_square_limit() -> Callable[[int], float]:
    """The value that a chi-square statistic exceeds once in a thousand, by degrees of freedom (Wilson and Hilferty)."""

    def limit(degrees: int) -> float:
        spread = 2 / (9 * degrees)
        return degrees * (1 - spread + 3.0902 * spread**0.5) ** 3

    return limit
