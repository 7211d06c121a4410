"""Makes the environment of a client, once for each set of pins: a venv, or a folder with node_modules. Their
dependencies conflict, so each has its own, in a folder that git ignores."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.declared import ROOT, USES, Client

FOLDER = Path(os.environ.get("CLIENTS_HOME") or ROOT / ".clients")
RECORD = "installed-from"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


class InstallError(Exception):
    """One sentence on why a client is not there."""


def environment(client: Client) -> Path:
    return FOLDER / client.name


def executable(client: Client) -> Path | str:
    """What runs the client's script."""
    if client.npm:
        return "node"
    return environment(client) / "bin" / "python" if client.packages else sys.executable


def is_installed(client: Client) -> bool:
    if not client.packages and not client.npm:
        return True
    record = environment(client) / RECORD
    return record.is_file() and record.read_text(encoding="utf-8") == fingerprint(client)


def fingerprint(client: Client) -> str:
    """Of all that decides what is installed."""
    pins = [*client.packages, *client.npm, *client.remove]
    files = [client.constraints, *(client.npm_folder / name for name in ("package.json", "package-lock.json"))]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    return hashlib.sha256("\n".join([*pins, *texts]).encode()).hexdigest()


def install(client: Client) -> None:
    if is_installed(client):
        return
    folder = environment(client)
    shutil.rmtree(folder, ignore_errors=True)  # of other pins, or half of one that was interrupted
    folder.parent.mkdir(parents=True, exist_ok=True)
    note = f" ({client.large})" if client.large else ""
    print(f"{client.name}: installing {' '.join(client.packages or client.npm)}{note}", flush=True)
    if client.npm:
        _install_npm(client)
    else:
        _run([sys.executable, "-m", "venv", str(folder)])
        pinned = ["-c", str(client.constraints)] if client.constraints.is_file() else []
        python = str(folder / "bin" / "python")
        _run([python, *PIP, "install", "--quiet", "--no-compile", *pinned, *client.packages])
        if client.remove:
            _run([python, *PIP, "uninstall", "--quiet", "--yes", *client.remove])
    (folder / RECORD).write_text(fingerprint(client), encoding="utf-8")


def _install_npm(client: Client) -> None:
    """`npm ci` where the lock is there; without, the lock is written, and names no registry."""
    folder = environment(client)
    if not client.npm_folder.is_dir():
        folder.mkdir()
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n', encoding="utf-8")
        _npm(folder, "install", "--save-exact", "--omit-lockfile-registry-resolved", *client.npm)
        client.npm_folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(folder / name, client.npm_folder / name)
    else:
        shutil.copytree(client.npm_folder, folder)
        _npm(folder, "ci")


def _npm(folder: Path, *arguments: str) -> None:
    if shutil.which("npm") is None:
        raise InstallError("npm is not on this machine: install Node.js 20 or newer")
    _run(["npm", *arguments, "--no-audit", "--no-fund", "--loglevel=error"], folder)


def lock(client: Client) -> None:
    """Install what the pins ask for and whatever that needs today, and write down all of it."""
    if client.npm:
        shutil.rmtree(client.npm_folder, ignore_errors=True)
        install(client)
        return
    client.constraints.unlink(missing_ok=True)
    install(client)
    write_lock(client)


def write_lock(client: Client) -> None:
    """Without what follows a `+`: that says which index a build came from, and another index has another."""
    listed = _run([str(environment(client) / "bin" / "python"), *PIP, "freeze"]).splitlines()
    pins = [line.partition("+")[0] for line in listed if "==" in line]
    client.constraints.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    (environment(client) / RECORD).write_text(fingerprint(client), encoding="utf-8")


def _run(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise InstallError(f"`{' '.join(command)}` failed: {lines[-1] if lines else done.returncode}")
    return done.stdout


def place_script(client: Client) -> Path:
    """Where the script is run from. JavaScript finds its packages beside itself, so it is copied there."""
    if not client.npm:
        return client.use
    for name in (client.use.name, "given.mjs"):
        shutil.copy(USES / name, environment(client) / name)
    return environment(client) / client.use.name
