"""What rooms have to say reaches the server's log as a line, once set up however often."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import logging
from twostroke.backends.cpu.thread_count import logger
from twostroke.server.log import show_what_rooms_say
show_what_rooms_say()
show_what_rooms_say()
logger.info("other programs take %.1f of %d cores", 0.5, 2)
logger.debug("not this")
"""


def test_what_a_room_says_is_a_line_on_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stderr == "other programs take 0.5 of 2 cores\n"
