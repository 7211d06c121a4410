"""Who is next, by the name of a policy. Each is one file; a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.core.service_level import ServiceLevels
from twostroke.scheduling.forecast import Forecast
from twostroke.scheduling.policies.fair import Fair
from twostroke.scheduling.policies.fifo import Fifo
from twostroke.scheduling.policies.policy import Policy
from twostroke.scheduling.policies.slack import Slack

DEFAULT_POLICY = "fair"

POLICIES: dict[str, Callable[[Forecast, float, ServiceLevels], Policy]] = {
    "fifo": Fifo,
    "slack": Slack,
    "fair": Fair,
}


def policy_named(name: str, forecast: Forecast, priority_aging_s: float, levels: ServiceLevels) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"the policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name](forecast, priority_aging_s, levels)
