"""Whether a member of a fleet still answers: a thread of its own asks it how it is, once a second. A process that was
stopped lives on and takes connections, but says nothing. Knows an address; decides nothing."""

from __future__ import annotations

import threading
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

LOOK_S = 1.0
"""Between two looks; also what an answer may take."""

_open = build_opener(ProxyHandler({})).open


class Pulse:
    def __init__(self, url: str) -> None:
        """`url`: of its health."""
        self._url = url
        self._was_well = False
        self._num_unanswered = 0
        self._turn = threading.Lock()
        self._life = 0
        """Counts processes: what was asked of one says nothing of the next."""

    @property
    def silent_s(self) -> float:
        """For how long it has not answered. Looks are counted, not time: when the whole machine stood still, nobody is
        to blame. 0 for one that has not been well yet, which may take long to start."""
        return self._num_unanswered * LOOK_S

    def begin(self) -> None:
        """A new process is at this address."""
        with self._turn:
            self._life += 1
            self._was_well, self._num_unanswered = False, 0

    def start(self) -> None:
        threading.Thread(target=self._look_on, daemon=True).start()

    def _look_on(self) -> None:
        while True:
            began_s = time.monotonic()
            self.look()
            time.sleep(max(0.0, began_s + LOOK_S - time.monotonic()))

    def look(self) -> None:
        life = self._life
        answer = self._ask()
        with self._turn:
            if life == self._life:
                self._was_well = self._was_well or answer is True
                self._num_unanswered = self._num_unanswered + 1 if answer is None and self._was_well else 0

    def _ask(self) -> bool | None:
        """Whether it says that it is well; None: it says nothing. Nobody there is an answer, too: whoever starts
        processes knows of that."""
        try:
            with _open(self._url, timeout=LOOK_S):
                return True
        except HTTPError:
            return False
        except (OSError, HTTPException) as error:
            return None if isinstance(getattr(error, "reason", error), TimeoutError) else False
