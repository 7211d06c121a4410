from __future__ import annotations

import pytest

from tests.speculation.cases import KINDS, Case, MakeCase
from tests.speculation.tiny import make_checkpoint


@pytest.fixture(scope="module")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    """For a backend, and a number of requests."""
    made: dict[tuple[str, int], Case] = {}

    def make(backend: str, count: int) -> Case:
        if (backend, count) not in made:
            folder = tmp_path_factory.mktemp("tiny")
            made[backend, count] = Case(backend, make_checkpoint(folder, kind=KINDS[backend]), count)
        return made[backend, count]

    return make
