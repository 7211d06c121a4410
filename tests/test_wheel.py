"""The wheel: it holds what the package needs, and installed apart from this folder it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "twostroke"
DATA_SUFFIXES = (".cu", ".cuh", ".json", ".jinja", ".typed", ".txt", *(".html", ".js", ".css", ".md", ".LICENSE"))


def run(*command: str | Path, timeout_s: float = 120.0) -> str:
    """What a command prints, without this folder's source on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(
        [str(word) for word in command], env=environment, cwd="/", capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` does, but by the hatchling that is installed: nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    [built] = folder.glob("*.whl")
    return built


def new_environment(folder: Path) -> Path:
    """An environment without any package, pip included. Its interpreter."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def answer_of(python: Path, model: Path) -> str:
    command = python.with_name("twostroke")
    return run(command, "run", model, "Hi", "--max-tokens", "3", "--temperature", "0", "--backend", "cpu")


def test_it_is_named_by_the_version(wheel: Path) -> None:
    [version] = re.findall(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert wheel.name == f"twostroke-{version}-py3-none-any.whl"


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    there = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert held == {path.relative_to(PACKAGE.parent).as_posix() for path in there}
    assert {path.suffix for path in there} <= {".py", *DATA_SUFFIXES}
    assert "twostroke/web/static/index.html" in held
    assert any(name.endswith(".cu") for name in held) and "twostroke/py.typed" in held
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_it_runs_beside_the_installed_dependencies(wheel: Path, tmp_path: Path, smollm2_path: Path) -> None:
    """The packages are those of the tests' environment; Twostroke itself is the wheel's."""
    python = new_environment(tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(packages), encoding="utf-8")
    assert run(python, "-c", "import twostroke; print(twostroke.__file__)").startswith(str(site))
    assert run(python.with_name("twostroke"), "--version").split()[1] in wheel.name
    assert answer_of(python, smollm2_path).strip()


@pytest.mark.slow
def test_it_runs_in_an_empty_environment_with_its_own_dependencies(
    wheel: Path, tmp_path: Path, smollm2_path: Path
) -> None:
    """What the core does not need is not brought along."""
    python = new_environment(tmp_path / "venv")
    constraints = ("-c", ROOT / "constraints.txt")
    run(sys.executable, "-m", "pip", "--python", python, "install", *constraints, wheel, timeout_s=280.0)
    assert run(python.with_name("twostroke"), "--version").split()[1] in wheel.name
    assert answer_of(python, smollm2_path).strip()
    installed = run(sys.executable, "-m", "pip", "--python", python, "list").lower()
    assert "numpy" in installed and "torch" not in installed and "fastapi" not in installed
