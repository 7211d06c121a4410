"""What Ray is asked to set aside for a replica of several cards. Skipped where there is no Ray; none is started."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from twostroke.cluster.deploy import _deployment
from twostroke.cluster.deployment_file import DeploymentPlan, PoolPlan
from twostroke.cluster.role import Role

pytestmark = pytest.mark.ray


def test_cards_of_one_copy_are_one_bundle_on_one_machine() -> None:
    pool = PoolPlan(Role.BOTH, cpus=2.0, gpus=4, resource="fast")
    made = _deployment(DeploymentPlan("m", (pool,)), pool)._replica_config
    assert made.placement_group_bundles == [{"CPU": 2.0, "GPU": 4.0, "fast": 0.001}]
    assert made.placement_group_strategy == "STRICT_PACK"
    assert made.ray_actor_options["num_gpus"] == 4, "the replica sees all of them"


@pytest.mark.parametrize("gpus", [0, 1])
def test_who_has_one_card_or_none_needs_no_gang(gpus: int) -> None:
    pool = PoolPlan(Role.DECODE, gpus=gpus)
    made = _deployment(DeploymentPlan("m", (pool,)), pool)._replica_config
    assert made.placement_group_bundles is None
