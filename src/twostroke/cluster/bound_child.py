"""A command that ends with its parent: `python -m twostroke.cluster.bound_child PARENT COMMAND...`. It asks the kernel
(Linux) to be killed when the parent ends, however that ends, and becomes the command. Elsewhere it only becomes it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """SIGKILL, as nothing else is sure to end; a server's engine then ends by itself. The kernel goes by the thread
    that started this process: that one has to live as long as the parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the kernel was asked
            sys.exit(3)


def bound(command: list[str]) -> list[str]:
    """The command, bound to this process."""
    return [sys.executable, "-P", "-m", "twostroke.cluster.bound_child", str(os.getpid()), *command]


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
