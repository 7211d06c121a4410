"""A command that ends when its standard input closes: `python -m twostroke.cluster.lifeline SECONDS COMMAND...`. It is
then told to stop (SIGTERM), and killed after SECONDS. For owners whose threads come and go, as those of Ray's replicas
do: the kernel would end a child with the thread that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from twostroke.cluster.bound_child import bound
from twostroke.cluster.children import kill_with_its_own


def main(limit_s: float, command: list[str]) -> None:
    child = subprocess.Popen(bound(command), stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with, args=(child,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: child.terminate())
    while os.read(0, 1):
        pass  # nothing is ever said: it returns when the other end is gone
    child.terminate()
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        kill_with_its_own(child.pid)
        child.wait()


def _end_with(child: subprocess.Popen[bytes]) -> None:
    code = child.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
