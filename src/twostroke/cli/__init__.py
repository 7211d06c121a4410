"""The command line: one file a command. An error meant for the user is one sentence on standard error and exit code 2;
Ctrl-C exits with 130; a traceback is a bug."""

from __future__ import annotations

import io
import os
import sys


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
        _fail(f"{type(error).__name__}: {error} (a bug, most likely; TWOSTROKE_TRACEBACK=1 shows where)")
    finally:
        _flush()


def _fail(sentence: str) -> None:
    """One line, whatever a hostile file put into it: control characters could move the cursor or rewrite the screen."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in sentence)
    _flush()
    print(f"twostroke: {shown}", file=sys.stderr)
    raise SystemExit(2) from None


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away (`| head`): nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
