"""How an engine process is started, and the folder its socket lies in."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from twostroke.server.messages import EngineSettings

MAX_FOLDER_CHARS = 80


def private_folder() -> Path:
    """Mode 0700: nobody else may connect. The path of a Unix socket is short, and some temporary folders' are not."""
    folder = tempfile.mkdtemp(prefix="twostroke-")
    if len(folder) > MAX_FOLDER_CHARS:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="twostroke-", dir="/tmp")
    return Path(folder)


async def start_process(path: Path, settings: EngineSettings) -> tuple[asyncio.subprocess.Process, int]:
    """The process, and the end of a pipe at which its beats arrive."""
    environment = {name: value for name, value in os.environ.items() if name != "TWOSTROKE_API_KEYS"}
    environment |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    beats, heart = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "twostroke.server.engine_process", str(path), str(heart)),
            stdin=asyncio.subprocess.PIPE,
            env=environment,
            pass_fds=(heart,),
            start_new_session=True,  # Ctrl-C is for this process, which drains first
        )
    except BaseException:
        os.close(beats)
        raise
    finally:
        os.close(heart)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    # Its standard input stays open: when this process ends, however it ends, so does the engine.
    return process, beats
