"""JSON beside a model's weights: untrusted, so its size is looked at before it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twostroke.core.errors import ModelError

_MAX_BYTES = 16 * 2**20


def read_json(file: Path) -> dict[str, Any]:
    """An object of settings."""
    config = _read(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return config


def read_json_list(file: Path) -> list[Any]:
    found = _read(file)
    if not isinstance(found, list):
        raise ModelError(f"{file} must hold a JSON list")
    return found


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{file} is larger than a model's config can be")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested beyond reason
        raise ModelError(f"{file} is not valid JSON") from None
