"""`/v1/loads` tells routers how loaded this worker is, in the fields that they read (smg polls it, SGLang has it). It
reports one rank, since all ranks of one engine share its queue and its KV. Made from the engine's last Stats, as
`/metrics` is."""

from __future__ import annotations

import time
from itertools import zip_longest

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke import __version__
from twostroke.cluster.role import Role
from twostroke.server.messages import Ready, Stats
from twostroke.server.metrics import Metrics, kv_occupancy
from twostroke.server.openapi import ERRORS
from twostroke.server.service import service_of

router = APIRouter(responses=ERRORS)


class Load(msgspec.Struct, frozen=True):
    """The load of one rank."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_total_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    """Known tokens that no launched step covers, those of prompts that are being read included."""
    num_used_tokens: int = 0
    """Tokens of KV that running requests hold, in the KV group of which the largest share is held."""
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    """The share of KV blocks that running requests hold, as `vllm:kv_cache_usage_perc` has it."""
    gen_throughput: float = 0.0
    """Tokens a second that decode wrote, over the last minute."""
    cache_hit_rate: float = 0.0
    """The share of prompt tokens that were found in the prefix cache since the engine started."""
    utilization: float = 0.0
    """The share of running slots that are taken."""
    max_running_requests: int = 0


class Loads(msgspec.Struct, frozen=True):
    timestamp: str
    version: str
    role: str
    """The role of the engine: prefill, decode or both."""
    dp_rank_count: int
    loads: tuple[Load, ...]


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Running and waiting requests, KV that is held, tokens a second: for routers that choose by load."""
    service = service_of(request)
    metrics = service.metrics
    if metrics.engine is None or metrics.facts is None:
        raise service.client.unavailable()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    role, load = service.settings.role or Role.BOTH, load_of(metrics, metrics.engine, metrics.facts)
    report = Loads(stamp, __version__, role, 1, (load,))
    return Response(msgspec.json.encode(report), media_type="application/json")


def load_of(metrics: Metrics, stats: Stats, facts: Ready) -> Load:
    running, most = stats.running_prefill + stats.running_decode, facts.engine.max_running
    used_blocks, num_blocks = _fullest(stats, facts)
    block_size = facts.engine.block_size
    return Load(
        num_running_reqs=running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=running + stats.waiting,
        num_waiting_uncached_tokens=stats.prefill_backlog_tokens,
        num_used_tokens=used_blocks * block_size,
        max_total_num_tokens=num_blocks * block_size,
        token_usage=round(kv_occupancy(stats), 4),
        gen_throughput=round(metrics.levels.recent.written_per_s(), 3),
        cache_hit_rate=round(stats.prefix_hit_tokens / max(1, stats.prefix_lookup_tokens), 4),
        utilization=round(running / max(1, most), 4),
        max_running_requests=most,
    )


def _fullest(stats: Stats, facts: Ready) -> tuple[int, int]:
    """Returns how many blocks are held, and how many there are, in the KV group of which the largest share is held.
    Groups of states do not count: their blocks hold no tokens."""
    groups = [
        (used, free + cached + used)
        for (free, cached, used), group in zip_longest(stats.blocks, facts.kv_groups)
        if group is None or not group.is_state
    ]
    return max(groups, key=lambda group: group[0] / max(1, group[1]), default=(0, 0))
