"""What tests of transfers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.transfers import Engine, Start


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def started(*given: str, **further: object) -> Engine:
        engines.append(Engine(*given, **further))  # type: ignore[arg-type]
        return engines[-1]

    yield started
    for engine in engines:
        engine.end()
