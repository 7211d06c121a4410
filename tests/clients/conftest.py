"""One server with a key for all clients, and a folder with the model's tokenizer for those that count tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, running_server

KEY = "key-of-the-clients"
SERVER_OPTIONS = ("smollm2", "--backend", "cpu", "--max-context", "8192", "--kv-memory", "1GB", "--threads", "1")
"""One thread: what a client computes itself runs beside the engine."""


@pytest.fixture(scope="session")
def keyed_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log_path = tmp_path_factory.mktemp("server") / "log"
    with running_server(log_path, *SERVER_OPTIONS, TWOSTROKE_API_KEYS=KEY) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name).save_pretrained(folder)
    # Clients bring older versions of transformers, which know the class by its former name.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return folder


@pytest.fixture
def client_environment(keyed_server: RunningServer, tokenizer_folder: Path, tmp_path: Path) -> dict[str, str]:
    """What a use is given; nothing of the user's own settings, and no way out but the server."""
    kept = {name: value for name in ("PATH", "LANG", "TMPDIR", "SSL_CERT_FILE") if (value := os.environ.get(name))}
    return {
        **kept,
        "HOME": str(tmp_path),
        "ADDRESS": keyed_server.address,
        "BASE_URL": keyed_server.base_url,
        "API_KEY": KEY,
        "MODEL": "smollm2",
        "TOKENIZER": str(tokenizer_folder),
        "NO_PROXY": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
