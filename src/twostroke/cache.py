"""Where Twostroke keeps what it can fetch or build again: models, compiled kernels. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$TWOSTROKE_CACHE`, else `$XDG_CACHE_HOME/twostroke`, else `~/.cache/twostroke`. It may not exist yet."""
    own = os.environ.get("TWOSTROKE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and Path(shared).is_absolute():  # the XDG rule: a relative one is ignored
        return Path(shared) / "twostroke"
    return Path("~/.cache/twostroke").expanduser().absolute()
