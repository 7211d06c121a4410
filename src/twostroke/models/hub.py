"""Models on the Hugging Face Hub: what an id means, and its files in the Hub's own local cache. Only what is read is
downloaded: never pickle, never code. `huggingface_hub` is imported when a download is asked for."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from twostroke.models.verification import hub_damage, hub_digest

FOLDER_PATTERNS = [
    *("model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"),
    "[0-9]_Dense/model.safetensors",
]
FOLDER_IGNORED = ["[!0-9]*/*", "*/*/*"]
"""Sub-folders hold other exports of the same weights, but for those with a number, like 1_Pooling: these are modules
of a model that gives vectors."""

_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:/\\][^:\\]*\.gguf))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubId:
    repository: str
    revision: str | None = None
    file: str | None = None
    """One GGUF file of the repository; None: its safetensors, as a folder."""


class HubError(Exception):
    """Why the Hub gave nothing; `resolve` makes the user's sentence of it."""


def parse_hub_id(name: str) -> HubId | None:
    """`org/name`, `org/name@revision`, `org/name:file.gguf` or `org/name@revision:file.gguf`; else None."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in PurePosixPath(match["file"] or "").parts:
        return None
    return HubId(match["repository"], match["revision"], match["file"])


def download(hub_id: HubId, patterns: list[str] | None = None, *, again: bool = False) -> Path:
    """The local path of the file, or of the folder, with the Hub's progress bar while it downloads. `patterns`: which
    files of the folder, by default those that a model needs. `again`: also what the cache holds already."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}, cache {constants.HF_HUB_CACHE}"
    try:
        # A snapshot of one file too: unlike hf_hub_download, it fails at once when there is no network.
        snapshot = huggingface_hub.snapshot_download(
            hub_id.repository,
            revision=hub_id.revision,
            allow_patterns=(patterns or FOLDER_PATTERNS) if hub_id.file is None else [glob.escape(hub_id.file)],
            ignore_patterns=FOLDER_IGNORED if hub_id.file is None else None,
            force_download=again,
        )
    except errors.GatedRepoError as error:
        reason = "the repository is gated: accept its terms on its page and log in with `hf auth login`"
        raise HubError(f"{where}: {reason}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{where}: there is no such repository, or it is private") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{where}: the repository has no revision {hub_id.revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        cause = _first_line(error.__cause__ or error)
        raise HubError(f"{where}: it is not in the cache, and the Hub could not be reached ({cause})") from error
    except Exception as error:  # HTTP, disk, validation: the library has no common base for them
        raise HubError(f"{where}: {_first_line(error)}") from error
    if hub_id.file is None:
        return Path(snapshot)
    path = Path(snapshot) / hub_id.file
    if not path.is_file():
        raise HubError(f"{where}: the repository has no file {hub_id.file!r}")
    return path


def verify_download(hub_id: HubId, path: Path, say: Callable[[str], None]) -> None:
    """Read what `download` gave and compare it with the digests that the Hub's cache keeps; what is damaged is fetched
    again. Raises HubError when it is still damaged then."""
    files = [path] if hub_id.file is not None else _model_files(path)
    digests = {file: digest for file in files if (digest := hub_digest(file)) is not None}
    say(f"verifying {_counted(len(digests))}, {sum(file.stat().st_size for file in digests) / 1e6:,.1f} MB")
    damaged = {file: sentence for file, digest in digests.items() if (sentence := hub_damage(file, digest))}
    if damaged:
        for sentence in damaged.values():
            say(f"{sentence}; it is fetched again")
        download(hub_id, [glob.escape(file.name) for file in damaged], again=True)
        left = [sentence for file in damaged if (sentence := hub_damage(file, digests[file]))]
        if left:
            raise HubError(f"{left[0]}; the Hub could not be reached, or gave the same bytes again")
    unknown = len(files) - len(digests)
    without = f"; of {_counted(unknown)} more the cache keeps no digest" if unknown else ""
    say(f"{hub_id.repository} is whole: {_counted(len(digests))} with the right digest{without}")


def _counted(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


def _model_files(folder: Path) -> list[Path]:
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.is_file() and any(fnmatch.fnmatch(entry.name, pattern) for pattern in FOLDER_PATTERNS)
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
