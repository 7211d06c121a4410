"""What people find around the code says what is so: the changelog and the version, workflows and hooks, the images."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import twostroke

ROOT = Path(__file__).resolve().parents[1]
YAML_FILES = sorted([ROOT / ".pre-commit-config.yaml", *(ROOT / ".github").rglob("*.yml")])
DOCKERFILES = sorted(ROOT.glob("Dockerfile*"))
RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE))


def test_the_version_is_the_changelogs_latest_release() -> None:
    releases = RELEASE.findall(text_of("CHANGELOG.md"))
    versions = [tuple(int(part) for part in version.split(".")) for version, _ in releases]
    assert releases[0][0] == twostroke.__version__
    assert versions == sorted(set(versions), reverse=True)
    assert [day for _, day in releases] == sorted((day for _, day in releases), reverse=True)
    assert "## [Unreleased]" in text_of("CHANGELOG.md").split(f"[{releases[0][0]}]")[0]


def test_the_version_is_kept_in_one_place() -> None:
    settings = tomllib.loads(text_of("pyproject.toml"))
    assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/twostroke/__init__.py"


def test_entries_of_the_changelog_have_the_usual_kinds() -> None:
    kinds = set(re.findall(r"^### (.+)$", text_of("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_it_is_yaml_and_names_make_targets_that_exist(path: Path) -> None:
    assert isinstance(parsed(path), dict)
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", path.read_text(encoding="utf-8")))
    assert named <= make_targets()


def test_the_workflow_runs_make_check_on_every_version_that_is_supported() -> None:
    jobs = parsed(ROOT / ".github" / "workflows" / "check.yml")["jobs"]
    assert any(step.get("run", "").startswith("make check") for step in jobs["check"]["steps"])
    assert any(step.get("run", "").startswith("make stress SECONDS=60") for step in jobs["check"]["steps"])
    assert any(step.get("run", "").startswith("make wheel") for step in jobs["wheel"]["steps"])
    classifiers = tomllib.loads(text_of("pyproject.toml"))["project"]["classifiers"]
    assert jobs["check"]["strategy"]["matrix"]["python"] == [line.rpartition(" ")[2] for line in classifiers]
    assert jobs["image"]["strategy"]["matrix"]["file"] == [path.name for path in DOCKERFILES]


def test_issue_forms_have_what_their_host_asks_for() -> None:
    forms = [path for path in YAML_FILES if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml"]
    assert forms
    for form in map(parsed, forms):
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids)) and all(part["attributes"]["label"] for part in form["body"])


def test_hooks_call_the_tools_that_make_lint_calls() -> None:
    [repository] = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        command = shlex.split(hook["entry"])
        assert hook["language"] == "system"
        assert command[0].removeprefix(".venv/bin/") in ("ruff", "mypy")
        assert f"$(BIN)/{' '.join(command[:2]).removeprefix('.venv/bin/').removesuffix(' --force-exclude')}" in text_of(
            "Makefile"
        )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_there_is_and_what_is_not_ignored(path: Path) -> None:
    allowed = {line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")}
    copied = [shlex.split(line)[1:-1] for line in path.read_text(encoding="utf-8").splitlines() if line[:5] == "COPY "]
    names = {name for names in copied for name in names}
    assert names and names <= allowed and all((ROOT / name).exists() for name in allowed)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_the_command_as_a_user_with_a_cache_that_stays(path: Path) -> None:
    words = dict(re.findall(r"^([A-Z]+) (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert words["ENTRYPOINT"] == '["twostroke"]' and words["VOLUME"] == "/cache"
    assert words["USER"] == "1000" and "TWOSTROKE_CACHE=/cache" in words["ENV"]
    assert "HEALTHCHECK" in words and words["EXPOSE"] == "8000"
    installed = r"\[([a-z,]+)\]\"$|^ARG EXTRAS=([a-z,]+)$"
    extras = ["".join(found) for found in re.findall(installed, path.read_text(encoding="utf-8"), re.MULTILINE)]
    there = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert all(extra in there for found in extras for extra in found.split(",")) and extras


def test_there_are_images_for_both_kinds_of_machine() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cuda"]
