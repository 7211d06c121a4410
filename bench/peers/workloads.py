"""The four workloads as token ids: fresh text for every attempt, so that no engine finds an earlier prompt in its
prefix cache. The same attempt has the same prompts for every engine. Knows no engine and no clock."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 0
TEXT_FILES = (
    *("_pydecimal.py", "argparse.py", "asyncio/base_events.py", "datetime.py", "inspect.py", "subprocess.py"),
    *("tarfile.py", "typing.py", "mailbox.py", "doctest.py", "pydoc.py", "optparse.py", "pickletools.py"),
    *("ipaddress.py", "ssl.py", "threading.py", "http/client.py"),
)
"""Of Python's own library: text that every machine has. What a release lacks is left out."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    prompt_tokens: tuple[int, int]
    """Least and most tokens of a prompt's own text."""
    output_tokens: int
    num_requests: int = 1
    at_once: bool = True
    """False: each request waits for the one before."""
    shared_prefix_tokens: int = 0

    def lengths(self) -> list[int]:
        """Each request's own tokens: the same in every attempt."""
        generator = random.Random(SEED)
        return [generator.randint(*self.prompt_tokens) for _ in range(self.num_requests)]

    @property
    def tokens_per_attempt(self) -> int:
        return self.shared_prefix_tokens + sum(self.lengths())


FULL = (
    Workload("w1", "512 in, 128 out", (512, 512), 128),
    Workload("w2", "4096 in, 32 out", (4096, 4096), 32),
    Workload("w3", "16 at once, 128 to 512 in, 128 out", (128, 512), 128, num_requests=16),
    Workload(
        "w4", "16 in turn behind a prefix of 1024, 32 in, 32 out", (32, 32), 32, 16, False, shared_prefix_tokens=1024
    ),
)
QUICK = (
    Workload("w1", "64 in, 16 out", (64, 64), 16),
    Workload("w2", "256 in, 8 out", (256, 256), 8),
    Workload("w3", "4 at once, 16 to 64 in, 8 out", (16, 64), 8, num_requests=4),
    Workload("w4", "4 in turn behind a prefix of 128, 16 in, 4 out", (16, 16), 4, 4, False, shared_prefix_tokens=128),
)
"""The same shapes in small: they prove the harness, not a claim."""


def library_text() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [folder / name for name in TEXT_FILES]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())


class PromptSource:
    """Hands out stretches of one long text, none of them twice."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
        self._position = 0

    @property
    def fingerprint(self) -> str:
        """Names the text and its tokens: results of different texts are not comparable to the letter."""
        return hashlib.sha256(",".join(map(str, self._token_ids)).encode()).hexdigest()[:16]

    def take(self, num_tokens: int) -> list[int]:
        end = self._position + num_tokens
        if end > len(self._token_ids):
            raise ValueError(
                f"the text has {len(self._token_ids)} tokens, and prompts of {end} were asked for: "
                "fewer repetitions or workloads are needed"
            )
        stretch = self._token_ids[self._position : end]
        self._position = end
        return stretch

    def prompts(self, workload: Workload) -> list[list[int]]:
        """One attempt's prompts."""
        prefix = self.take(workload.shared_prefix_tokens)
        return [prefix + self.take(length) for length in workload.lengths()]


def choose_workloads(names: Sequence[str], quick: bool) -> list[Workload]:
    known = {workload.name: workload for workload in (QUICK if quick else FULL)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no workload {', '.join(unknown)}; the workloads are: {', '.join(known)}")
    return [workload for name, workload in known.items() if name in names]
