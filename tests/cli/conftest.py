"""A tiny model's shape, for commands that draw its weights. Its name looks like markup, which it must not become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.lab.conftest import SHAPE


@pytest.fixture(scope="session")
def shape_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "tiny [red]"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder
