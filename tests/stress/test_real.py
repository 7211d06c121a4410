"""The second storey, as long as `make test` has time for it: one server, one engine killed among its clients. All the
other disasters are a slow test, and `make stress` goes on with them for as long as is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.stress import TEST_SECONDS
from tests.stress.served import Disaster, any_options, served

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
CROWD_SHARE = 0.08
"""Of all seconds, what clients may take: the rest goes into a server's start and an engine's."""


def test_a_server_whose_engine_is_killed_among_its_clients(smollm2_path: Path, tmp_path: Path) -> None:
    with served(tmp_path) as found:
        found.round("0", CROWD_SHARE * TEST_SECONDS, 12, Disaster.KILL)
        assert found.counts["answers"] and found.counts["malformed"] and found.counts["hung up"], found.counts


@pytest.mark.slow
def test_a_server_through_every_disaster(smollm2_path: Path, tmp_path: Path) -> None:
    with served(tmp_path, *any_options(tmp_path, 1)) as found:
        for number, disaster in enumerate([*Disaster, Disaster.NONE]):
            found.round(f"{number}", 6.0, (8, 24, 64)[number % 3], disaster)
        for name in ("answers", "malformed", "hung up", "left", "429", "503"):
            assert found.counts[name], found.counts
