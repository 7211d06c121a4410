"""What `twostroke simulate` may be asked: which requests arrive, and how many replicas take them. Each field is an
option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import SENT_EARLY
from twostroke.core.setting import integer, number, switch, text

if TYPE_CHECKING:
    from twostroke.planner.report import Objective
    from twostroke.planner.trace import TraceRequest

REQUESTS, REPLICAS = "Requests", "Replicas"
"""The panels of `simulate`'s help."""
MAX_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class TraceWish:
    rate: float = number(
        1.0, 0.0, None, REQUESTS, "Requests a second, on average, in random arrivals.", is_above_low=True
    )
    count: int = integer(1000, 1, None, REQUESTS, "How many requests arrive.", flag="--requests")
    prompt: str = text("500", REQUESTS, "Prompt tokens: 500, or 200-2000.", flag="--input", metavar="N|A-B")
    output: str = text("200", REQUESTS, "Tokens of an answer, likewise.", metavar="N|A-B")
    burst: int = integer(1, 1, None, REQUESTS, "How many arrive at once; the rate stays the same on the whole.")
    seed: int = integer(0, 0, None, REQUESTS, "The same seed draws the same arrivals and lengths.")

    def requests(self) -> list[TraceRequest]:
        from twostroke.planner.trace import Lengths, bursts

        prompts, answers = Lengths.parse(self.prompt), Lengths.parse(self.output)
        return bursts(self.rate, self.count, prompts, answers, burst=self.burst, seed=self.seed)


def requests_of(path: Path) -> list[TraceRequest]:
    """Of a file."""
    from twostroke.planner.trace import read_trace

    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines)
    except OSError as error:
        raise BadRequestError(f"the trace {path} could not be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequestError(f"the trace {path} is not text") from None


@dataclass(frozen=True, slots=True)
class ReplicasWish:
    on: str = text(
        "this",
        REPLICAS,
        "this: the engine of this machine, calibrated; or a device of the plan's table: h200.",
        metavar="DEVICE",
    )
    count: int = integer(1, 1, MAX_REPLICAS, REPLICAS, "Engines side by side.", flag="--replicas")
    router: str = text(
        "auto",
        REPLICAS,
        "Who gets the next request: least-loaded (one pool's default), round-robin, least-backlog (predicted seconds "
        "of prompts), or prefix (the same, less what is cached there; two pools' default where prompts begin alike).",
    )
    prefill: int | None = integer(
        None, 1, MAX_REPLICAS, REPLICAS, "Two pools: this many replicas read prompts, and hand KV over to"
    )
    decode: int | None = integer(None, 1, MAX_REPLICAS, REPLICAS, "this many that write answers.")
    link: str | None = text(
        None,
        REPLICAS,
        "What each device of a replica hands KV over by: GB a second (50), 400Gbit, 100gbe, ndr, or a device (h200) "
        "whose own link it is. Default: the device's, within one machine of eight, else 400gbe.",
        metavar="GBPS|NAME",
    )
    early_kv: bool = switch(
        SENT_EARLY,
        REPLICAS,
        "Each chunk's KV goes while the next one is read, or all of it when the prompt was read. Default: as engines "
        "do.",
    )
    slo_ttft_ms: float | None = number(
        None,
        0.0,
        None,
        REPLICAS,
        "A request counts as good if its first token comes within this time",
        is_above_low=True,
    )
    slo_tpot_ms: float | None = number(
        None, 0.0, None, REPLICAS, "and its further tokens take no longer than this on average.", is_above_low=True
    )

    def objective(self) -> Objective:
        from twostroke.planner.report import Objective

        limits_ms = (self.slo_ttft_ms, self.slo_tpot_ms)
        return Objective(*(None if value is None else value / 1e3 for value in limits_ms))

    @property
    def has_pools(self) -> bool:
        return self.prefill is not None or self.decode is not None
