"""What a worker of a fleet does: read prompts, write answers, or both. Knows the names that routers have for it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    PREFILL = "prefill"
    """Reads prompts and hands their KV over."""
    DECODE = "decode"
    """Takes KV that others made, and writes."""
    BOTH = "both"
    """A plain replica."""

    @property
    def worker_type(self) -> str:
        """As smg calls it."""
        return "regular" if self is Role.BOTH else self.value


STAND_IN = "/stand-in"
"""Of a server that writes: where a router asks it to read, when nobody else does. It says that nobody has."""
DOOR = "/door"
"""Where requests are taken for pools that are empty: cluster/door.py."""
KV_CONNECTOR = "NixlConnector"
"""What makes smg hand `kv_transfer_params` from a prefill worker to a decode worker."""
