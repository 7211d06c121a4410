from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cores import all_cores


@pytest.fixture(scope="module", autouse=True)
def _threads_side_by_side() -> Iterator[None]:
    with all_cores():
        yield
