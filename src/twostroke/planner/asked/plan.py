"""One plan from what was asked: by a command's options, or by the live page's sliders, which send the same names. Both
come here, so both get the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.setting import Setting, settings_of
from twostroke.planner.asked.model import PlannedModel
from twostroke.planner.asked.speculation import SpeculationWish
from twostroke.planner.asked.wish import DeploymentWish, LoadWish, Wish
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import Efficiency
from twostroke.planner.estimate import estimate
from twostroke.planner.record import as_json, record

DEFAULT_DEVICE = "h200"
THIS = "this"


def deploy(wish: Wish, load: LoadWish) -> tuple[Deployment, Efficiency | None]:
    """What is planned, and by whose measure where not by the table's."""
    on = wish.asked.on
    if len(on) > 1:
        raise BadRequestError("one --on at a time, or --search to compare several devices")
    if load.is_for_search:
        raise BadRequestError("--rate, --slo-ttft-ms and --slo-tpot-ms belong to --search")
    own = wish.asked.own_efficiency()
    deployment, fitted = wish.on(on[0] if on else DEFAULT_DEVICE)
    return deployment, own or fitted


def plan_json(asked: Mapping[str, object], read_model: Callable[[str], PlannedModel]) -> str:
    """`asked`: options of `twostroke plan` by name (`tensor_parallel`), and `model`. What that command prints with
    --json; raises BadRequestError with a sentence."""
    asked = dict(asked)
    model = asked.pop("model", None)
    if not isinstance(model, str) or not model:
        raise BadRequestError("model must be the name of a model, like Llama-3.1-8B")
    taken = {kind: _taken(kind, asked) for kind in (DeploymentWish, LoadWish, SpeculationWish)}
    decode_weights = asked.pop("decode_weights", "auto")
    settings_of(EngineConfig)["decode_weights"].check("decode_weights", decode_weights)
    if asked:
        raise BadRequestError(f"a plan has no option {next(iter(asked))!r:.60}; there are {', '.join(option_names())}")
    load = LoadWish(**taken[LoadWish])
    lengths = load.lengths()
    config = EngineConfig(decode_weights=decode_weights)  # type: ignore[arg-type]  # it was checked
    deployment = DeploymentWish(**taken[DeploymentWish])
    if THIS in deployment.on:
        raise BadRequestError(
            "a server plans for devices by name: `twostroke plan --on this` measures the machine, which would hold up "
            "whoever waits for an answer"
        )
    speculating = SpeculationWish(**taken[SpeculationWish]).speculating()
    planned, own = deploy(Wish(read_model(model), deployment, config, speculating), load)
    return as_json(record(estimate(planned, lengths, users=load.users, efficiency=own)))


def option_names() -> list[str]:
    return [
        name
        for kind in (DeploymentWish, LoadWish, SpeculationWish)
        for name in _names(kind)
        if name not in _SEARCH_ONLY
    ] + ["decode_weights"]


def defaults() -> dict[str, Any]:
    """Of every option, by name."""
    found: dict[str, Any] = {}
    for kind in (DeploymentWish, LoadWish, SpeculationWish):
        plain = kind()
        found |= {name: getattr(plain, field) for name, (field, _) in _names(kind).items()}
    return {name: value for name, value in found.items() if name not in _SEARCH_ONLY} | {
        "on": DEFAULT_DEVICE,
        "decode_weights": "auto",
    }


_SEARCH_ONLY = frozenset({"rate", "slo_ttft_ms", "slo_tpot_ms"})


def _names(kind: type[Any]) -> dict[str, tuple[str, Setting]]:
    """What an option is called, and which field it fills."""
    settings = settings_of(kind)
    return {
        (settings[one.name].flag or one.name).removeprefix("--").replace("-", "_"): (one.name, settings[one.name])
        for one in fields(kind)
    }


def _taken(kind: type[Any], asked: dict[str, object]) -> dict[str, Any]:
    """The fields of this class that were given, checked; they are taken out of `asked`."""
    taken: dict[str, Any] = {}
    for name, (field, setting) in _names(kind).items():
        if name not in asked:
            continue
        value = asked.pop(name)
        if setting.kind == "texts":
            if not isinstance(value, str):
                raise BadRequestError(f"{name} must be a text, not {value!r:.60}")
            value = (value,)
        elif value is not None or not setting.is_optional:
            setting.check(name, value)
        taken[field] = value
    return taken
