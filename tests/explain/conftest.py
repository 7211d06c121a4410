from __future__ import annotations

from pathlib import Path

import pytest

from tests.explain.stage import model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("explain") / "model")
