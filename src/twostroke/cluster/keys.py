"""The secrets of a fleet. Children get them in their environment, whoever asks later from a file of mode 0600; they are
never arguments, which every user of a machine can read."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE
from twostroke.core.errors import BadRequestError

FLEET_KEY_VARIABLE = "TWOSTROKE_FLEET_KEY"
"""What workers of a fleet know one another by."""


def new_fleet_key() -> str:
    return secrets.token_urlsafe(32)


def router_key(fleet_key: str) -> str:
    """What the router's worker API asks for. It is sent over HTTP, so it is not the fleet's key itself."""
    return hmac.digest(fleet_key.encode(), b"router", "sha256").hex()


def environment_of(fleet_key: str) -> dict[str, str]:
    """For the fleet's processes."""
    return {FLEET_KEY_VARIABLE: fleet_key, ROUTER_KEY_VARIABLE: router_key(fleet_key)}


def write_secret(path: Path, secret: str) -> None:
    """Nobody but its owner reads it, at no moment. Raises OSError."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")


def read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise BadRequestError(f"{path} holds a key and others may read it: chmod 600 it")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"cannot read the key in {path}: {error}") from None
