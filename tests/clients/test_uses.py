"""Each client, in its pinned version, does its smallest real use against the server. `make test-clients` installs
them; what is not installed is skipped."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.clients.declared import Client, chosen
from tests.clients.install import environment, executable, is_installed, place_script
from tests.clients.page import result_path
from tests.server.running import RunningServer

USE_LIMIT_S = 580.0
CLIENTS = chosen(os.environ.get("TWOSTROKE_TEST_CLIENTS", ""))

pytestmark = [pytest.mark.clients, pytest.mark.timeout(USE_LIMIT_S + 60)]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client(
    client: Client, keyed_server: RunningServer, client_environment: dict[str, str], tmp_path: Path
) -> None:
    if not is_installed(client):
        pytest.skip(f"not installed: make test-clients CLIENTS={client.name}")
    faults_before = faults(keyed_server)
    path = f"{environment(client) / 'bin'}{os.pathsep}{client_environment['PATH']}"
    done = subprocess.run(
        [executable(client), place_script(client)],
        cwd=tmp_path,
        env={**client_environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=USE_LIMIT_S,
        check=False,
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    lines = done.stdout.strip().splitlines()
    assert lines and lines[-1].startswith('{"parts"'), f"it ended before it told what it did:\n{said}"
    parts = json.loads(lines[-1])["parts"]
    result = {"version": client.version, "date": datetime.now(UTC).date().isoformat(), "parts": parts}
    result_path(client).parent.mkdir(parents=True, exist_ok=True)
    result_path(client).write_text(json.dumps(result), encoding="utf-8")
    assert parts and not [part for part in parts if part["error"]], said
    assert faults(keyed_server) == faults_before, keyed_server.log()[-4000:]


def faults(server: RunningServer) -> int:
    """A client that gets its answer over the server's own faults has hidden them by trying again."""
    return server.log().count("Traceback") + server.log().count("Internal Server Error")
