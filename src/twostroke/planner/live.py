"""What a running server tells of itself: its /metrics page read, and the share of the floor that its steps reach worked
out from it. Standard library only."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from dataclasses import dataclass

from twostroke.core.errors import BadRequestError
from twostroke.cost.floor import StepWork
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import FloorShares
from twostroke.planner.estimate import phases_of
from twostroke.planner.phases import Phases

TIMEOUT_S = 10.0
MAX_PAGE_BYTES = 8 << 20
LEAST_REQUESTS = 5
LEAST_DECODE_STEPS = 20
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Steps:
    count: float
    total_s: float

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class LiveMetrics:
    """Sums since the server started; means are over requests."""

    requests: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    ttft_s: float
    queue_s: float
    prefill_s: float
    tpot_s: float
    steps: dict[str, Steps]
    """By kind: prefill, decode, mixed."""
    kv_occupancy: float | None

    @property
    def mean_input(self) -> int:
        return max(1, round(self.prompt_tokens / self.requests))

    @property
    def mean_cached(self) -> int:
        return min(self.mean_input - 1, round(self.cached_tokens / self.requests))

    @property
    def mean_output(self) -> int:
        return max(1, round(self.output_tokens / self.requests))

    @property
    def mean_batch(self) -> float:
        """Streams a decoding step: every token after a request's first one was a slot of such a step."""
        return (self.output_tokens - self.requests) / (self.steps["decode"].count + self.steps["mixed"].count)

    @property
    def mean_users(self) -> int:
        """Those that decode, and those whose prompt is waiting or read meanwhile, by the time that each takes."""
        decoding_s = self.tpot_s * (self.mean_output - 1)
        return max(1, round(self.mean_batch * (1 + self.ttft_s / decoding_s))) if decoding_s else 1


@dataclass(frozen=True, slots=True)
class Calibrated:
    metrics: LiveMetrics
    shares: FloorShares
    checks: tuple[tuple[str, float, float], ...]
    """What requests felt on that server, by name: measured, and predicted with these shares, in seconds."""


def fetch_metrics(url: str, api_key: str | None = None) -> LiveMetrics:
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise BadRequestError(
            f"{url[:80]!r} is not the address of a server: write something like http://localhost:8000"
        )
    address = address.rstrip("/").removesuffix("/metrics").removesuffix("/v1") + "/metrics"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            page = response.read(MAX_PAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        hint = ": it asks for a key (--api-key)" if error.code in (401, 403) else ""
        raise BadRequestError(f"{address} answered {error.code}{hint}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadRequestError(f"{address} cannot be read: {error}") from error
    if len(page) > MAX_PAGE_BYTES:
        raise BadRequestError(f"{address} is longer than {MAX_PAGE_BYTES} bytes: that is no metrics page")
    return parse_metrics(page.decode("utf-8", errors="replace"), address)


def parse_metrics(page: str, source: str = "the page") -> LiveMetrics:
    samples: dict[tuple[str, str], float] = {}
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#"):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels: dict[str, str] = dict(_LABEL.findall(match["labels"] or ""))
        samples[match["name"] or "", labels.get("kind", labels.get("le", ""))] = value
    if ("twostroke_ttft_seconds_count", "") not in samples:
        raise BadRequestError(f"{source} has no twostroke_ttft_seconds: it is not the metrics page of this server")

    def mean(name: str) -> float:
        count = samples.get((f"twostroke_{name}_seconds_count", ""), 0.0)
        return samples.get((f"twostroke_{name}_seconds_sum", ""), 0.0) / count if count else 0.0

    def steps(kind: str) -> Steps:
        name = "twostroke_step_seconds"
        return Steps(samples.get((f"{name}_count", kind), 0.0), samples.get((f"{name}_sum", kind), 0.0))

    return LiveMetrics(
        requests=samples["twostroke_ttft_seconds_count", ""],
        prompt_tokens=samples.get(("twostroke_prompt_tokens_total", ""), 0.0),
        cached_tokens=samples.get(("twostroke_cached_prompt_tokens_total", ""), 0.0),
        output_tokens=samples.get(("twostroke_output_tokens_total", ""), 0.0),
        ttft_s=mean("ttft"),
        queue_s=mean("queue"),
        prefill_s=mean("prefill"),
        tpot_s=mean("tpot"),
        steps={kind: steps(kind) for kind in ("prefill", "decode", "mixed")},
        kv_occupancy=samples.get(("twostroke_kv_occupancy", "")),
    )


def calibrate(deployment: Deployment, metrics: LiveMetrics, source: str) -> Calibrated:
    """The share of each phase's floor that the server's steps reach, taken at its mean lengths and batch."""
    decode, mixed, prefill = (metrics.steps[kind] for kind in ("decode", "mixed", "prefill"))
    if metrics.requests < LEAST_REQUESTS or decode.count < LEAST_DECODE_STEPS:
        raise BadRequestError(
            f"the server has answered {metrics.requests:.0f} requests in {decode.count:.0f} decode steps, too few to "
            f"plan from: at least {LEAST_REQUESTS} and {LEAST_DECODE_STEPS} are needed"
        )
    floor = phases_of(deployment)
    context = metrics.mean_input + metrics.mean_output // 2
    decode_share = _decode_s(floor, metrics.mean_batch, context) / decode.mean_s
    # A mixed step is a decode step and somebody's chunk.
    prefill_total_s = prefill.total_s + max(0.0, mixed.total_s - mixed.count * decode.mean_s)
    one_s = floor.prefill_s(metrics.mean_cached, metrics.mean_input - metrics.mean_cached)
    prefill_share = metrics.requests * one_s / prefill_total_s
    shares = FloorShares(source=source, error="", prefill=prefill_share, decode=decode_share)
    real = phases_of(deployment, shares)
    loaded = real.loaded(metrics.mean_input, metrics.mean_output, metrics.mean_cached, metrics.mean_users)
    checks = (("prefill", metrics.prefill_s, loaded.prefill_s), ("TPOT", metrics.tpot_s, loaded.tpot_s))
    error = ", ".join(f"{name} {predicted / measured - 1:+.0%}" for name, measured, predicted in checks if measured)
    error = f"{error} against the means of the {metrics.requests:.0f} requests it has answered"
    shares = FloorShares(source=source, error=error, prefill=prefill_share, decode=decode_share)
    return Calibrated(metrics, shares, checks)


def _decode_s(phases: Phases, batch: float, context: int) -> float:
    """A batch between two whole ones is between them."""
    low = max(1, int(batch))
    above = max(0.0, batch - low)
    low_s, high_s = (phases.step_s(StepWork(contexts=(context,) * size)) for size in (low, low + 1))
    return low_s + above * (high_s - low_s)
