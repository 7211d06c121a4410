"""`pull` of a Hub id, with the real huggingface_hub: what is there already is verified, and healed from a Hub that this
test serves on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import twostroke

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": bytes(range(256)) * 64,
    "tokenizer.json": b"{}",
}
LARGE = "model.safetensors"
"""Kept by its sha256, as the Hub keeps large files; the others by git's hash."""


def git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def etag(name: str) -> str:
    content = FILES[name]
    return hashlib.sha256(content).hexdigest() if name == LARGE else git_hash(content)


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as a download of one repository asks for."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            self._answer(json.dumps([self._entry(name) for name in FILES]).encode(), {})
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode(), {})
        else:
            name = path.rpartition("/")[2]
            self._answer(FILES[name], {"ETag": f'"{etag(name)}"', "X-Repo-Commit": COMMIT})

    def _entry(self, name: str) -> dict[str, object]:
        size = len(FILES[name])
        entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": git_hash(FILES[name])}
        if name == LARGE:
            entry["lfs"] = {"oid": etag(name), "size": size, "pointerSize": 130}
        return entry

    def _answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def pull(name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    kept |= {"HF_HOME": str(home), "PYTHONPATH": str(Path(twostroke.__file__).parent.parent), **environment}
    command = [sys.executable, "-c", "from twostroke.cli import main; main()", "pull", name]
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)


def test_pull_verifies_and_heals_what_the_cache_holds(endpoint: str, tmp_path: Path) -> None:
    first = pull("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    assert "org/name is whole: 3 files with the right digest" in first.stderr
    snapshot = Path(first.stdout.strip())
    for name in (LARGE, "config.json"):  # a file kept by its sha256, and one kept by git's hash
        content = bytearray(FILES[name])
        content[10] ^= 1
        (snapshot / name).resolve().write_bytes(content)
    offline = pull("org/name", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert f"{snapshot / 'config.json'} is damaged: its git hash is" in offline.stderr.splitlines()[-1]
    healing = pull("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert healing.returncode == 0, healing.stderr
    assert f"{snapshot / LARGE} is damaged: its sha256 is" in healing.stderr
    assert {name: (snapshot / name).read_bytes() for name in FILES} == FILES
    assert "is damaged" not in pull("org/name", tmp_path, HF_ENDPOINT=endpoint).stderr


def test_pull_of_a_path_says_that_nothing_is_known_of_it(tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    done = pull(str(tmp_path / "own.gguf"), tmp_path)
    assert done.returncode == 0
    assert "nothing was fetched, and no digest is known" in done.stderr
