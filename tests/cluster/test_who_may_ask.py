"""Who may have a prompt read for another worker: callers of this machine, the router that the server registers with,
and nobody else, whatever their headers say. A caller with an address of this machine's network card, who calls the
loopback address, stands for one from elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.fleets import ASKS, KEY
from tests.cluster.routing import running_smg, until
from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke.cluster.fleet import free_port
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import RouterClient

BODY = {"model": "scripted", "prompt": "?" * 80, "max_tokens": 1, "temperature": 0.0, "kv_transfer_params": ASKS}
OPTIONS = ("--backend", "reference", "--name", "scripted", "--role", "prefill", "--kv-host-gb", "0.01")
SOON = ("--drain", "0.2")  # a lease that nobody takes would be waited for
KEYS = {"TWOSTROKE_FLEET_KEY": KEY, "TWOSTROKE_ROUTER_KEY": "between-router-and-workers"}


def own_address() -> str | None:
    """Of a network card; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def asked(server: RunningServer, caller: str, **headers: str) -> httpx.Response:
    transport = httpx.HTTPTransport(local_address=caller)
    with httpx.Client(transport=transport, timeout=60.0) as client:
        return client.post(f"{server.address}/v1/completions", json=BODY, headers=headers)


@pytest.fixture(scope="module")
def address() -> str:
    found = own_address()
    if found is None:
        pytest.skip("this machine has no address but its own")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_scripted(tmp_path_factory.mktemp("models") / "own", "hermes"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "log", model, *OPTIONS, *SOON, **KEYS) as running:
        yield running


def params_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def test_this_machine_may_ask_and_others_may_not(server: RunningServer, address: str) -> None:
    assert params_of(asked(server, "127.0.0.1"))
    refused = asked(server, address)
    assert refused.status_code == 400 and f"{address} is no router's (--router-host)" in refused.text


def test_headers_say_nothing_about_who_asks(server: RunningServer, address: str) -> None:
    """Uvicorn believes a proxy of this machine who its client is, and routers pass headers of clients on."""
    assert params_of(asked(server, "127.0.0.1", **{"X-Forwarded-For": "203.0.113.9"}))
    assert asked(server, address, **{"X-Forwarded-For": "127.0.0.1"}).status_code == 400


@pytest.mark.fleet
def test_the_router_that_a_server_registers_with_may_ask(model: str, address: str, tmp_path: Path) -> None:
    """By its name's addresses, which are looked up."""
    pytest.importorskip("smg")
    port = free_port()
    url = f"http://{address}:{port}"
    key = KEYS["TWOSTROKE_ROUTER_KEY"]
    router = RouterClient(url, key)
    with (
        running_smg(tmp_path / "smg.log", port, key, has_roles=True, more=("--host", "0.0.0.0")),
        running_server(tmp_path / "log", model, *OPTIONS, "--register", url, **KEYS) as server,
    ):
        until(lambda: any(one.role is Role.PREFILL for one in router.workers()), said=server.log)
        assert params_of(asked(server, address))
