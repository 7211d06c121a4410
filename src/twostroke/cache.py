"""Where Twostroke keeps what it can fetch or build again: models, compiled kernels. Entries of compiled code are whole
or not there: several processes may write one, and a machine may stop while they do. Standard library only."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_MAGIC = b"TWOSTROKE-KERNELS-1\n"
_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """`$TWOSTROKE_CACHE`, else `$XDG_CACHE_HOME/twostroke`, else `~/.cache/twostroke`. It may not exist yet."""
    own = os.environ.get("TWOSTROKE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and Path(shared).is_absolute():  # the XDG rule: a relative one is ignored
        return Path(shared) / "twostroke"
    return Path("~/.cache/twostroke").expanduser().absolute()


def read_entry(path: Path) -> bytes | None:
    """The code of a cache entry, or None where there is none that can be trusted to be whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not content.startswith(_MAGIC):
        return None
    digest, code = content[len(_MAGIC) :][:_DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
    return code if hashlib.sha256(code).digest() == digest else None


def write_entry(path: Path, code: bytes) -> None:
    """Where it cannot be written it is compiled again next time."""
    with suppress(OSError):
        write_whole(path, _MAGIC + hashlib.sha256(code).digest() + code)


def write_whole(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
