"""A process beside this one for what strangers wrote (templates, schemas): it answers messages, and is ended when it
takes too long. The parent's half, and the limits that such a process puts on itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from twostroke.core.errors import ModelError

_KEPT_ENVIRONMENT = ("PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH")
"""What the process is told of this one's environment: nothing secret."""


class ProcessEndedError(Exception):
    def __init__(self, by_clock: bool) -> None:
        self.by_clock = by_clock


class Message(NamedTuple):
    """A line of JSON, and texts that follow it as they are: writing a long text as JSON and reading it back would keep
    Python's lock for as long as a token may take."""

    fields: dict[str, Any]
    texts: Sequence[bytes] = ()


def write_message(stream: IO[bytes], message: Message) -> None:
    sizes = {"text_bytes": [len(text) for text in message.texts]} if message.texts else {}
    stream.write(json.dumps(message.fields | sizes).encode("ascii") + b"\n")
    for text in message.texts:
        stream.write(text)
    stream.flush()


def read_message(stream: IO[bytes]) -> Message | None:
    """None where the other side has ended, in the middle of a message too."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    fields = json.loads(line)
    sizes = fields.pop("text_bytes", ())
    texts = [stream.read(size) for size in sizes]
    return Message(fields, texts) if all(map(int.__eq__, map(len, texts), sizes)) else None


def exchange(process: subprocess.Popen[bytes], message: Message, limit_s: float) -> Message:
    """Send a message, take one back; past the limit the process is killed, which ends the wait on every platform."""
    assert process.stdin is not None and process.stdout is not None
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        process.kill()

    clock = threading.Timer(limit_s, stop)
    clock.daemon = True
    clock.start()
    try:
        write_message(process.stdin, message)
        reply = read_message(process.stdout)
    except OSError:
        reply = None
    finally:
        clock.cancel()
    if reply is None:
        raise ProcessEndedError(timed_out.is_set())
    return reply


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


def set_up_process(process: subprocess.Popen[bytes], setup: dict[str, Any], limit_s: float, purpose: str) -> None:
    """Send its first message. A process that does not answer that is ended."""
    try:
        exchange(process, Message(setup), limit_s)
    except ProcessEndedError:
        end_process(process)
        raise ModelError(f"the process for {purpose} did not start") from None


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was never sent cannot be flushed now
                pipe.close()
    process.wait()


def answer_requests(
    begin: Callable[[Message], Callable[[Message], Message]],
    max_cpu_s: int | None = None,
    tidy: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Such a process's own half: the first message sets it up, with its limits, and each after it is answered until the
    parent ends. `max_cpu_s`: of an answer; None: as the first message says. `tidy` is told how long a request's texts
    were, once they are gone."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(requests)
    if first is None:
        return  # started for nothing
    limit_memory(first.fields["max_memory_bytes"])
    answer = begin(first)
    reply = Message({"ready": True})
    while True:
        write_message(answers, reply)
        message = read_message(requests)
        if message is None:
            return
        limit_cpu_time(first.fields["max_cpu_s"] if max_cpu_s is None else max_cpu_s)
        num_bytes = sum(map(len, message.texts))
        reply = answer(message)
        del message
        tidy(num_bytes)


def limit_memory(max_bytes: int) -> None:
    """Of this process, for good."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu_time(seconds: int) -> None:
    """From now on; set anew for each message."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
