"""The files in deploy/ say what this version understands: options of commands, fields of a fleet, versions that agree.
Nothing is started: that takes containers and a cluster."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from twostroke.cli.app import app
from twostroke.cluster.deployment_file import DeploymentPlan, parse_deployment
from twostroke.cluster.keys import FLEET_KEY_VARIABLE
from twostroke.cluster.machines import Machines
from twostroke.cluster.replica import ways_of_kv
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def option_values(arguments: list[str]) -> dict[str, Any]:
    """Of `twostroke`, as the command reads them; raises where it would refuse them."""
    root: Any = typer.main.get_command(app)
    command = root.commands[arguments[0]]
    values: dict[str, Any] = command.make_context(arguments[0], arguments[1:]).params
    return values


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_the_workers_of_the_compose_file_are_two_pools_that_know_one_another(compose: dict[str, Any]) -> None:
    roles = {}
    for name, service in compose.items():
        if name == "router":
            continue
        options = option_values(shlex.split(service["command"]))
        roles[name] = options["role"]
        assert options["register"] == "http://router:8000" and options["advertise"] == f"http://{name}:8000"
        assert options["transfer_host"] == name and options["host"] == "0.0.0.0"
        assert set(service["environment"]) == {FLEET_KEY_VARIABLE, ROUTER_KEY_VARIABLE}
        readers = [other for other in compose if other.startswith("prefill")]
        assert (list(options["peer"] or ()) == readers) is (options["role"] == "decode")
    assert sorted(roles.values()) == ["decode", "decode", "prefill"]


def test_smg_takes_the_options_of_the_compose_file(compose: dict[str, Any]) -> None:
    pytest.importorskip("smg")
    from smg.launch_router import parse_router_args

    router = compose["router"]
    assert router["entrypoint"] == ["python", "-m", "twostroke.cluster.smg_child", "0"]
    found = parse_router_args(router["command"])
    assert found.pd_disaggregation and (found.host, found.port) == ("0.0.0.0", 8000)
    assert router["ports"] == ["127.0.0.1:8000:8000"], "of this machine alone"


def test_images_of_the_compose_file_have_extras_that_exist(compose: dict[str, Any]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for service in compose.values():
        assert service["build"]["args"]["EXTRAS"] in extras
        assert (DEPLOY / service["build"]["context"] / "Dockerfile").exists()


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    found = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text())
    return {one["kind"]: one for one in found}


@pytest.fixture(scope="module")
def plan(manifests: dict[str, Any]) -> DeploymentPlan:
    return parse_deployment(manifests["ConfigMap"]["data"]["fleet.toml"])


def test_the_manifests_fleet_is_one_and_ray_has_room_for_its_pools(
    manifests: dict[str, Any], plan: DeploymentPlan
) -> None:
    cluster = manifests["RayService"]["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert {pool.role.value for pool in plan.pools} == set(groups)
    for pool in plan.pools:
        group = groups[pool.role.value]
        assert (pool.least, pool.most) == (group["minReplicas"], group["maxReplicas"])
        assert re.findall(r'\\"(\w+)\\": 1', group["rayStartParams"]["resources"]) == [pool.resource]
        [container] = group["template"]["spec"]["containers"]
        assert float(container["resources"]["limits"]["cpu"]) >= pool.cpus
    head = cluster["headGroupSpec"]
    assert re.findall(r'\\"(\w+)\\": 1', head["rayStartParams"]["resources"]) == [plan.router_resource]


def test_the_manifest_names_what_is_there(manifests: dict[str, Any], plan: DeploymentPlan) -> None:
    spec = manifests["RayService"]["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    assert f"\ndef {function}(" in path.read_text()
    [container] = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert application["args"]["file"] == f"{mounted['fleet']}/fleet.toml"
    assert [one["name"] for one in container["env"]] == [FLEET_KEY_VARIABLE, "TWOSTROKE_CACHE"]
    service = manifests["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == plan.router_port
    labels = spec["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


@pytest.mark.parametrize("pod", ["10.244.3.7", "192.168.17.4", "172.20.0.9", "100.64.1.1", "fd00:10:244::5"])
def test_a_pod_that_is_added_later_is_a_peer(plan: DeploymentPlan, pod: str) -> None:
    """Networks that Kubernetes gives its pods. The worker that writes is started when Ray knows one machine."""
    writer = option_values(["serve", plan.model, *ways_of_kv("10.244.0.2", ("10.244.0.2", *plan.peers))])
    assert writer["transfer_host"] == "10.244.0.2" and "10.244.0.2" in writer["peer"]
    peers = Machines(writer["peer"], "--peer")
    assert pod in peers and "203.0.113.7" not in peers and "2001:db8::1" not in peers


def test_ray_is_of_one_version_everywhere(manifests: dict[str, Any]) -> None:
    version = manifests["RayService"]["spec"]["rayClusterConfig"]["rayVersion"]
    recipe = (DEPLOY / "Dockerfile.ray").read_text()
    assert re.findall(r"^FROM rayproject/ray:([\d.]+)-", recipe, re.MULTILINE) == [version]
    assert f'"ray[serve]=={version}"' in recipe
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["ray"][0]).specifier.contains(version)
    assert "--tag twostroke-ray " in recipe and "twostroke-ray:latest" in (DEPLOY / "rayservice.yaml").read_text()
