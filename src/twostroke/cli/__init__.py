"""The command line: one file a command. An error meant for the user is one sentence on standard error and exit code 2;
Ctrl-C exits with 130; a traceback is a bug."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A disk that is full, or fails."""


def main() -> None:
    from twostroke.core.errors import TwostrokeError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no such character shows another
    try:
        from twostroke.cli.app import app

        app()
    except TwostrokeError as error:
        _fail(str(error))
    except MemoryError:
        _fail("there is not enough memory for this")
    except KeyboardInterrupt:  # before or after a command; inside one, typer exits with the same code
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get("TWOSTROKE_TRACEBACK"):
            raise
        if isinstance(error, OSError) and (sentence := _failed_file(error)) is not None:
            _fail(sentence)
        _fail(f"{type(error).__name__}: {error} (a bug, most likely; TWOSTROKE_TRACEBACK=1 shows where)")
    finally:
        _flush()


def _failed_file(error: OSError) -> str | None:
    """What the system refused: a file that it names, or the output, which has no name; None: something else."""
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"the output could not be written: {error.strerror}" if error.errno in OUTPUT_ERRORS else None


def _fail(sentence: str) -> None:
    """One line, whatever a hostile file put into it: control characters could move the cursor or rewrite the screen."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in sentence)
    _drop_output()
    with contextlib.suppress(OSError):  # where not even this can be written, the exit code says it
        print(f"twostroke: {shown}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def _flush() -> None:
    """What is still to be written, while its failure can be told: Python's own flush at exit is too late."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away (`| head`): nothing is wrong
        _drop_output()
    except OSError as error:
        _fail(f"the output could not be written: {error.strerror}")


def _drop_output() -> None:
    """Write out what can be; what cannot must not fail again at exit."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
