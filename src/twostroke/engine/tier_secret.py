"""A secret that lasts as long as KV on disk does: a server names its tenants with it, so that each finds its own
prefixes again after a restart, and nobody else's."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from twostroke.config import KVConfig
from twostroke.kv.tiers.disk import KEY_NAME
from twostroke.kv.tiers.files import read_or_make_key


def tier_secret(config: KVConfig) -> bytes | None:
    """None: nothing outlives the process, or the folder cannot be used, which the engine will say."""
    if config.disk is None:
        return None
    folder = Path(config.disk).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return blake2b(b"tenants", key=read_or_make_key(folder / KEY_NAME), digest_size=32).digest()
    except OSError:
        return None
