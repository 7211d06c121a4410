"""From what a user calls a model to its place on this disk: a known short name, a path, or a Hub id, in that order.
Knows where files may be; opens none of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from twostroke.cache import cache_folder
from twostroke.core.errors import ModelError
from twostroke.models.hub import HubError, HubId, download, parse_hub_id, verify_download
from twostroke.models.known import KNOWN_MODELS, Progress, fetch_known
from twostroke.models.weights.safetensors import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, refuse_pickle

__all__ = ["KNOWN_MODELS", "resolve"]


def resolve(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    from_hub: Callable[[HubId], Path] = download,
    verify: bool = False,
) -> Path:
    """The path of a .gguf file or of a Hugging Face folder, fetched if need be. `cache_dir` stands in for
    `cache_folder()`; Hub downloads are kept in the Hub's own cache. `verify`: what is there already is compared with
    its digest, and fetched again where it is damaged."""
    if not name:
        raise ModelError("the model's name is empty")
    models_folder = (cache_dir or cache_folder()) / "models"
    if name in KNOWN_MODELS:
        return fetch_known(name, KNOWN_MODELS[name], models_folder, progress, verify=verify)
    path = _existing(name)
    if path is not None:
        found = _model_at(path)
        if verify and progress is not None:
            progress(f"{found} is a place on this disk: nothing was fetched, and no digest is known to verify it by")
        return found
    hub_id = None if _looks_like_path(name) else parse_hub_id(name)
    if hub_id is None:
        outcome = "it is not a Hub id (org/name, org/name@revision or org/name:file.gguf)"
        raise ModelError(_not_found(name, models_folder, outcome))
    try:
        found = _from_hub(hub_id, from_hub)
    except HubError as error:
        raise ModelError(_not_found(name, models_folder, f"the Hub gave nothing ({error})")) from error
    if verify:
        try:
            verify_download(hub_id, found, progress or (lambda message: None))
        except (HubError, OSError) as error:
            raise ModelError(f"{name} could not be verified: {error}") from error
    return found


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL byte, a home that is not there
        return None


def _looks_like_path(name: str) -> bool:
    """Whether no Hub id can be meant: `org/name` is one, unless it ends as a file does."""
    return name.startswith((".", "/", "~")) or "\\" in name or (name.endswith(".gguf") and ":" not in name)


def _model_at(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.suffix == ".safetensors":
            raise ModelError(
                f"{path} is one file of a model; give its folder, {path.parent}, which holds config.json too"
            )
        if path.suffix in PICKLE_SUFFIXES:
            raise ModelError(
                f"{path} is a pickle file; pickle files are never read, because loading one can run any code"
            )
        raise ModelError(f"{path} is neither a .gguf file nor a folder")
    if not path.is_dir():
        raise ModelError(f"{path} is neither a regular file nor a folder")
    if (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        return path
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ModelError(f"cannot list {path}: {error.strerror}") from error
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return path / ggufs[0]
    if ggufs:
        raise ModelError(f"{path} holds {len(ggufs)} GGUF files; name one of them: {', '.join(ggufs[:8])}")
    refuse_pickle(path, names)
    raise ModelError(f"the folder {path} holds no model: neither {SINGLE_FILE}, nor {INDEX_FILE}, nor a .gguf file")


def _from_hub(hub_id: HubId, from_hub: Callable[[HubId], Path]) -> Path:
    path = from_hub(hub_id)
    if hub_id.file is None and not any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        raise HubError(
            f"{hub_id.repository} holds no {SINGLE_FILE}; if it holds GGUF files, name one as "
            f"{hub_id.repository}:FILE.gguf"
        )
    return path


def _not_found(name: str, models_folder: Path, hub_outcome: str) -> str:
    """One sentence that says everything that was looked for, and where."""
    close = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
    places = f"there is no file or folder {str(Path(name).absolute())!r}; {hub_outcome}"
    known = f"the known short names are: {', '.join(KNOWN_MODELS)} (kept in {models_folder})"
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"cannot find the model {name!r}: {places}; {known}{hint}"
