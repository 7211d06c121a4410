"""A process beside this one for what strangers wrote (templates, schemas): it answers lines, and is ended when it takes
too long. The parent's half, and the limits that such a process puts on itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

_KEPT_ENVIRONMENT = ("PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH")
"""What the process is told of this one's environment: nothing secret."""


class ProcessEndedError(Exception):
    def __init__(self, by_clock: bool) -> None:
        self.by_clock = by_clock


def exchange(process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> dict[str, Any]:
    """Send a line, take one back; past the limit the process is killed, which ends the wait on every platform."""
    assert process.stdin is not None and process.stdout is not None
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        process.kill()

    clock = threading.Timer(limit_s, stop)
    clock.daemon = True
    clock.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        reply = process.stdout.readline()
    except (BrokenPipeError, OSError):
        reply = b""
    finally:
        clock.cancel()
    if not reply.endswith(b"\n"):
        raise ProcessEndedError(timed_out.is_set())
    value: dict[str, Any] = json.loads(reply)
    return value


def start_process(module: str) -> subprocess.Popen[bytes]:
    """Run a module of this package; raises OSError where no process is to be had."""
    environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is for this process, which ends that one
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was never sent cannot be flushed now
                pipe.close()
    process.wait()


def limit_memory(max_bytes: int) -> None:
    """Of this process, for good."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu_time(seconds: int) -> None:
    """From now on; set anew for each line."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
