"""The process of a rank above 0: `python -m twostroke.backends.sharded.rank_process`, its setup on standard input. It
computes every batch that rank 0 tells it, and keeps nothing between two but weights, KV and states: rows and sampling
are rank 0's. On a card it launches every Step that rank 0 does, and knows of its rows how long they are. It ends when
rank 0 says so, when another rank is gone, or when its standard input closes: never later than its parent. What went
wrong it says in one line on standard output."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial

from twostroke import backends
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.interface import Backend, RanksPartedError, Ticket
from twostroke.backends.sharded import step_bytes
from twostroke.backends.sharded.batch_bytes import from_bytes
from twostroke.backends.sharded.lines import RankLostError
from twostroke.backends.sharded.meeting import Meeting
from twostroke.backends.sharded.setup import RankSetup
from twostroke.backends.sharded.state_orders import carry_out
from twostroke.core.errors import TwostrokeError

MOST_IN_FLIGHT = 2
"""Steps on a card: rank 0 has no more."""


class Exit(IntEnum):
    TOLD = 0
    PARENT_GONE = 3
    RANK_LOST = 4
    FAILED = 5


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends its ranks
    words = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed does not come between
    setup = RankSetup.from_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with setup.on_own_cores():
        return _work(setup, words)


def _work(setup: RankSetup, words: int) -> int:
    meeting = setup.meeting()
    try:
        compute, own = _started(setup, meeting, words)
    except TwostrokeError as error:
        return _fail(words, str(error))
    except (MemoryError, OSError) as error:
        return _fail(words, str(error) or "there is not enough memory")
    except RanksPartedError:
        return Exit.RANK_LOST
    _say(words, {"ready": True})
    try:
        compute()
    except (RankLostError, RanksPartedError):
        return Exit.RANK_LOST
    except Exception as error:
        return _fail(words, f"{type(error).__name__}: {error}")
    finally:
        own.close()
    return Exit.TOLD


def _started(setup: RankSetup, meeting: Meeting, words: int) -> tuple[Callable[[], None], Backend]:
    """What it will do, and by which backend."""
    checkpoint = setup.source.load()
    if setup.place is None:
        on_host = setup.create(meeting, checkpoint)
        return partial(_compute, on_host, meeting), on_host
    backends.load_factory(setup.backend).supports(checkpoint)  # its libraries are there, which take a while
    _say(words, {"here": True})
    own = setup.create_on_card(checkpoint)
    return partial(_launch, own, meeting), own


def _launch(own: Backend, meeting: Meeting) -> None:
    """Every Step that rank 0 launches. Its results are rank 0's, too: here they say that a step is done."""
    in_flight = deque[Ticket]()
    while message := meeting.hear():
        in_flight.append(own.launch(step_bytes.from_bytes(message)))
        if len(in_flight) > MOST_IN_FLIGHT:
            in_flight.popleft().result()


def _compute(own: HostBackend, meeting: Meeting) -> None:
    while message := meeting.hear():
        batch = from_bytes(carry_out(message, own.host_states))
        meeting.collect(own.score(batch).logits)


def _say(words: int, fields: dict[str, object]) -> None:
    os.write(words, json.dumps(fields).encode() + b"\n")


def _fail(words: int, sentence: str) -> int:
    _say(words, {"failed": sentence[:2000]})
    return Exit.FAILED


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing more is ever written: this returns when the other end is gone
    os._exit(Exit.PARENT_GONE)


if __name__ == "__main__":
    sys.exit(main())
