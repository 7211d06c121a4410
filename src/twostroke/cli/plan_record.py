"""What a search for deployments found, as a program reads it. `planner/record.py` has a plan of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from twostroke.planner.not_run import not_run
from twostroke.planner.search import Found, Rejected

if TYPE_CHECKING:
    from twostroke.cli.plan_tail import Tail


def search_record(
    found: Sequence[Found], rejected: Sequence[Rejected], tail: Tail | None, is_met: bool
) -> dict[str, Any]:
    return {
        "found": [
            {
                "usd_per_hour": one.usd_per_hour,
                "device": one.deployment.device.name,
                "tensor_parallel": one.deployment.tensor_parallel,
                "pipeline_parallel": one.deployment.pipeline_parallel,
                "expert_parallel": one.deployment.expert_parallel,
                "replicas": one.deployment.replicas,
                "weights": one.deployment.formats.weights,
                "not_run": list(not_run(one.deployment)),
                "has_decode_copies": one.deployment.shape.decode_weights is not None,
                "users_per_replica": one.loaded.users,
                "ttft_s": one.loaded.ttft_s,
                "tpot_s": one.loaded.tpot_s,
                "usd_per_million_output_tokens": one.usd_per_million_output_tokens,
                "efficiency": {"source": one.efficiency.source, "error": one.efficiency.error},
            }
            for one in found
        ],
        "rejected": [
            {
                "device": one.deployment.device.name,
                "tensor_parallel": one.deployment.tensor_parallel,
                "pipeline_parallel": one.deployment.pipeline_parallel,
                "expert_parallel": one.deployment.expert_parallel,
                "weights": one.deployment.formats.weights,
                "reason": one.reason,
            }
            for one in rejected
        ],
        "meets_the_level": is_met,
        "first_simulated": None if tail is None else asdict(tail),
    }
