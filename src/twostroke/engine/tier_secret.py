"""A secret that lasts as long as KV on disk does: a server names its tenants with it, so that each finds its own
prefixes again after a restart, and nobody else's."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from twostroke.config import KVConfig
from twostroke.core.errors import BackendError
from twostroke.kv.tiers.files import open_folder


def tier_secret(config: KVConfig) -> bytes | None:
    """None: nothing outlives the process, or the folder cannot be used, which the engine will say."""
    if config.disk is None:
        return None
    try:
        key = open_folder(Path(config.disk).expanduser().absolute())
    except BackendError:
        return None
    return blake2b(b"tenants", key=key, digest_size=32).digest()
