"""How large each workload is: as other engines are measured with, or small enough for a few cores; and how a user asks
for some of them, in other sizes: `single,nano:n=4,batch:n=8:prompt_len=64`."""

from __future__ import annotations

from dataclasses import fields, replace

from twostroke.core.errors import BadRequestError
from twostroke.lab.workload import Workload
from twostroke.lab.workloads import Batch, Nano, Noisy, Online, Prefill, Prefix, Single

FULL: dict[str, Workload] = {kind.NAME: kind() for kind in (Single, Prefill, Batch, Prefix, Noisy, Online, Nano)}
"""For a data-centre GPU: what other engines are measured with."""

SMALL: dict[str, Workload] = {
    "single": Single(out_len=64),
    "prefill": Prefill(prompt_len=4096, reps=1),
    "batch": Batch(n=16, prompt_len=256, out_len=64),
    "prefix": Prefix(n=8, shared=1024),
    "noisy": Noisy(streams=4, prompt_len=128, out_len=96, long_prompt=2048, warm_steps=32),
    "online": Online(n=12, rate=2.0, prompt_least=50, prompt_most=500, out_least=20, out_most=60),
    "nano": Nano(n=16),
}
"""For a few cores: the same kinds of work, and figures that compare with no other engine's."""

SCALES = {"full": FULL, "small": SMALL}
FULL_SIZE_BACKENDS = ("cuda",)
"""Backends that take the full sizes unless asked otherwise."""


def scale_for(backend: str) -> str:
    return "full" if backend in FULL_SIZE_BACKENDS else "small"


def check_names(text: str | None) -> None:
    """Raises for what `choose` would refuse at any scale: before a model is loaded for it."""
    choose(text, "full")


def choose(text: str | None, scale: str) -> list[Workload]:
    """The workloads that were asked for, in that order; None: all."""
    if text is None:
        return list(SCALES[scale].values())
    return [_parse(part.strip(), SCALES[scale]) for part in text.split(",")]


def _parse(text: str, sizes: dict[str, Workload]) -> Workload:
    name, *changes = text.split(":")
    if name not in sizes:
        raise BadRequestError(f"there is no workload {name!r:.60}; the workloads are: {', '.join(sizes)}")
    workload = sizes[name]
    return replace(workload, **dict(_change(workload, change) for change in changes))


def _change(workload: Workload, text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    types = {field.name: type(getattr(workload, field.name)) for field in fields(workload)}
    if name not in types:
        raise BadRequestError(f"{workload.NAME} has no size {name!r:.60}; its sizes are: {', '.join(types)}")
    try:
        return name, types[name](value)
    except ValueError:
        raise BadRequestError(f"{workload.NAME}: {name} must be a number, not {value!r:.60}") from None


def describe(workload: Workload) -> str:
    """Its sizes, as they would be asked for."""
    return " ".join(f"{field.name}={getattr(workload, field.name)}" for field in fields(workload))
