from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import twostroke
from twostroke.core.errors import ModelError
from twostroke.models.hub import HubError, HubId, parse_hub_id
from twostroke.models.known import KNOWN_MODELS
from twostroke.models.resolve import resolve


def no_hub(hub_id: HubId) -> Path:
    raise AssertionError(f"the Hub was asked for {hub_id}")


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


# Short names and paths


def test_a_short_name_already_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF of a known model"
    digest = hashlib.sha256(content).hexdigest()
    known = replace(KNOWN_MODELS["smollm2"], file_bytes=len(content), file_sha256=digest)
    monkeypatch.setitem(KNOWN_MODELS, "smollm2", known)
    path = touch(tmp_path / "models") / known.file_name
    path.write_bytes(content)
    assert resolve("smollm2", cache_dir=tmp_path, from_hub=no_hub) == path


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = touch(tmp_path, "a.gguf") / "a.gguf"
    assert resolve(str(path), from_hub=no_hub) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/a.gguf", from_hub=no_hub) == path
    monkeypatch.chdir(tmp_path)
    assert resolve("a.gguf", from_hub=no_hub) == Path("a.gguf")


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_hugging_face_folder(tmp_path: Path, weights: str) -> None:
    folder = touch(tmp_path / "model", "config.json", weights, "extra.gguf")
    assert resolve(str(folder), from_hub=no_hub) == folder


def test_a_folder_of_one_gguf(tmp_path: Path) -> None:
    assert resolve(str(touch(tmp_path, "a.gguf", "README.md")), from_hub=no_hub) == tmp_path / "a.gguf"


def test_an_existing_folder_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "org" / "name", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", from_hub=no_hub) == Path("org/name")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.gguf", "b.gguf"], r"holds 2 GGUF files; name one of them: a\.gguf, b\.gguf"),
        (["config.json"], r"holds no model: neither model\.safetensors, nor .*, nor a \.gguf file"),
        (["config.json", "pytorch_model.bin"], r"pytorch_model\.bin only; pickle files are never read"),
    ],
)
def test_a_folder_without_one_model(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(str(touch(tmp_path, *names)), from_hub=no_hub)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "is one file of a model; give its folder"),
        ("pytorch_model.bin", "pickle files are never read"),
        ("notes.txt", "is neither a .gguf file nor a folder"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(str(touch(tmp_path, name) / name), from_hub=no_hub)


NOWHERE = ["nowhere", "./nowhere", "/no/where.gguf", "org/file.gguf", "~/nowhere", "~nobody-of-this-name/x", "a/b/c"]
NOWHERE += ["a\0b", "x" * 5000, "../no/where", "org/name:w.bin", "org/name:../a.gguf", "https://host/org/name", "a b/c"]


@pytest.mark.parametrize("name", NOWHERE)
def test_what_is_nowhere_gets_one_error_that_says_where_it_was_sought(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(name, cache_dir=tmp_path, from_hub=no_hub)
    assert "\n" not in str(caught.value)
    for part in ("there is no file or folder", "is not a Hub id", "smollm2", str(tmp_path / "models")):
        assert part in str(caught.value)


def test_a_slip_in_a_short_name_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2\?"):
        resolve("smolm2", cache_dir=tmp_path, from_hub=no_hub)
    with pytest.raises(ModelError, match="name is empty"):
        resolve("", from_hub=no_hub)


# The Hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Org-1/Name.v2_x", HubId("Org-1/Name.v2_x")),
        ("org/name@main", HubId("org/name", "main")),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("org/name:model.Q4_K.gguf", HubId("org/name", None, "model.Q4_K.gguf")),
        ("org/name@v1:sub/a.gguf", HubId("org/name", "v1", "sub/a.gguf")),
        ("name", None),
        ("org/name/more", None),
        ("org/name:weights.bin", None),
        ("-org/name", None),
        ("../name", None),
        ("org/name@", None),
        ("org/name\n", None),
    ],
)
def test_hub_ids(name: str, expected: HubId | None) -> None:
    assert parse_hub_id(name) == expected


def test_a_hub_id_is_downloaded(tmp_path: Path) -> None:
    asked: list[HubId] = []

    def from_hub(hub_id: HubId) -> Path:
        asked.append(hub_id)
        return touch(tmp_path, "model.safetensors", "a.gguf") / (hub_id.file or "")

    assert resolve("org/name@v1", from_hub=from_hub) == tmp_path
    assert resolve("org/name:a.gguf", from_hub=from_hub) == tmp_path / "a.gguf"
    assert asked == [HubId("org/name", "v1"), HubId("org/name", None, "a.gguf")]


def test_a_repository_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model\.safetensors; if it holds GGUF files, name one as org/name:"):
        resolve("org/name", from_hub=lambda _: touch(tmp_path, "config.json"))


def test_the_hubs_reason_is_told(tmp_path: Path) -> None:
    def from_hub(hub_id: HubId) -> Path:
        raise HubError("the repository is gated")

    with pytest.raises(ModelError) as caught:
        resolve("org/name", cache_dir=tmp_path, from_hub=from_hub)
    for part in ("'org/name'", "no file or folder", "the repository is gated", "smollm2", str(tmp_path)):
        assert part in str(caught.value)


def resolve_offline(name: str, hub_home: Path) -> subprocess.CompletedProcess[str]:
    """The real huggingface_hub, which reads its settings when it is imported: so in a process of its own."""
    program = (
        "import sys\nfrom twostroke.core.errors import ModelError\nfrom twostroke.models.resolve import resolve\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "try:\n    print(resolve(sys.argv[1]))\nexcept ModelError as error:\n    sys.exit(str(error))\n"
    )
    source = Path(twostroke.__file__).parent.parent
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub_home), "PYTHONPATH": str(source)}
    return subprocess.run(
        [sys.executable, "-c", program, name], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def cached_snapshot(hub_home: Path, *names: str) -> Path:
    """What a download leaves in the Hub's cache."""
    repository, commit = hub_home / "hub" / "models--org--name", "0123456789abcdef0123456789abcdef01234567"
    (touch(repository / "refs") / "main").write_text(commit)
    return touch(repository / "snapshots" / commit, *names)


def test_offline_with_a_downloaded_model(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path, "config.json", "model.safetensors", "a.gguf")
    for name, expected in (("org/name", snapshot), ("org/name:a.gguf", snapshot / "a.gguf")):
        finished = resolve_offline(name, tmp_path)
        assert finished.stdout.strip() == str(expected), finished.stderr
    finished = resolve_offline("org/name:absent.gguf", tmp_path)
    assert finished.returncode == 1
    assert "absent.gguf" in finished.stderr


def test_offline_without_it_is_one_clear_error_and_quick(tmp_path: Path) -> None:
    started_s = time.perf_counter()
    finished = resolve_offline("org/name", tmp_path)
    assert time.perf_counter() - started_s < 100  # who tries the network waits longer
    assert finished.returncode == 1
    message = finished.stderr.strip()
    assert len(message.splitlines()) == 1
    for part in ("cannot find the model 'org/name'", "no file or folder", str(tmp_path), "offline", "smollm2"):
        assert part in message
