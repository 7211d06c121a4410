"""The command line: one file a command. An error meant for the user is one sentence on standard error and exit code 2;
Ctrl-C exits with 130; a traceback is a bug."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from twostroke.core.errors import TwostrokeError

    try:
        from twostroke.cli.app import app

        app()
    except TwostrokeError as error:
        sys.stdout.flush()
        print(f"twostroke: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader went away (`| head`): nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
