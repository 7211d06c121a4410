"""Who a request belongs to, as the engine sees it: a name for each API key that tells nothing of the key and that no
client can guess, and the salt under which its prefixes are cached."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

NO_TENANT = ""


class Tenants:
    """One for the life of a server: names outlive it where cached prefixes do."""

    def __init__(self, api_keys: Sequence[str], *, share_prefixes: bool, secret: bytes | None = None) -> None:
        """`secret`: one that lasts as long as prefixes on disk; None: they end with this server, and so do names."""
        secret = secrets.token_bytes(32) if secret is None else secret
        self._names = [hmac.digest(secret, key.encode(), "sha256").hex() for key in api_keys]
        self._share_prefixes = share_prefixes

    def name(self, key: int) -> str:
        """`key`: its number; -1 where none was asked for."""
        return NO_TENANT if key < 0 else self._names[key]

    def salt(self, key: int, cache_salt: str) -> str:
        """A key's name comes first and is of one length, so that whatever a request calls its own salt, it divides the
        space of its own key and reaches no other."""
        if key < 0 or self._share_prefixes:
            return cache_salt
        return f"{self._names[key]}/{cache_salt}"
