"""Makes each engine's weights from the one model file, by the peer's own tools, once. A conversion is made under a
temporary name and put in place by a rename, so an interrupted one leaves nothing that looks finished."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.peers.home import CONVERTERS, Home
from bench.peers.install import InstallError, Say, ensure_installed


@dataclass(frozen=True, slots=True)
class Conversion:
    peer: str
    """The venv whose tools make it."""
    command: tuple[str, ...]
    """After the venv's Python; SOURCE and TARGET stand for paths."""
    suffix: str = ""
    made_from: str = "as-is"


def _llama(kind: str) -> Conversion:
    return Conversion("llama-cpp", (str(CONVERTERS / "llama_kinds.py"), "SOURCE", "TARGET", kind), ".gguf")


def _hugging_face(dtype: str) -> Conversion:
    return Conversion("transformers", (str(CONVERTERS / "hugging_face.py"), "SOURCE", "TARGET", dtype))


def _openvino(*options: str) -> Conversion:
    tool = ("-m", "optimum.commands.optimum_cli", "export", "openvino")
    command = (*tool, "--model", "SOURCE", "--task", "text-generation-with-past", *options, "TARGET")
    return Conversion("openvino-export", command, made_from="hf-float32")


LLAMA_KINDS = ("q4_0", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k")
LLAMA_KINDS += ("iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "bf16")
"""Of `convert/llama_kinds.py`."""
CONVERSIONS: dict[str, Conversion] = {
    **{f"gguf-{kind}": _llama(kind) for kind in LLAMA_KINDS},
    "hf-float32": _hugging_face("float32"),
    "hf-bfloat16": _hugging_face("bfloat16"),
    "openvino-int8": _openvino("--weight-format", "int8"),
    # The usual group of 128 does not divide every width of a small model.
    "openvino-int4": _openvino("--weight-format", "int4", "--group-size", "64"),
}


def ensure_converted(home: Home, source: Path, weights: str, say: Say) -> Path:
    """The path of these weights, made now if they are not there; raises InstallError."""
    if weights == "as-is":
        return source
    conversion = CONVERSIONS[weights]
    target = home.models(source) / f"{weights}{conversion.suffix}"
    if target.exists():
        return target
    origin = ensure_converted(home, source, conversion.made_from, say)
    ensure_installed(home, conversion.peer, say)
    say(f"{weights}: converting {origin.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"unfinished-{os.getpid()}-{target.name}")
    _remove(unfinished)
    names = {"SOURCE": str(origin), "TARGET": str(unfinished)}
    command = [str(home.python(conversion.peer)), *(names.get(word, word) for word in conversion.command)]
    log = home.log(f"convert-{weights}")
    with log.open("wb") as file:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if status or not unfinished.exists():
        _remove(unfinished)
        raise InstallError(f"{weights} could not be made (exit {status}); see {log}")
    if target.exists():  # another run was quicker
        _remove(unfinished)
    else:
        unfinished.rename(target)
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
