"""What `twostroke plan` may be asked: on which devices and how cut, and for which load. Each field is an option. Knows
how a wish becomes a Deployment, and nothing of how a plan is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twostroke.core.errors import BadRequestError
from twostroke.core.setting import integer, number, several, text

if TYPE_CHECKING:
    from twostroke.config import EngineConfig
    from twostroke.cost.classify import RequestLengths
    from twostroke.cost.devices import Device
    from twostroke.planner.asked.model import PlannedModel
    from twostroke.planner.deployment import Deployment
    from twostroke.planner.efficiency import Efficiency
    from twostroke.planner.search import ServiceLevel
    from twostroke.planner.speculating import Speculating

DEPLOYMENT, LOAD, SEARCH = "Deployment", "Load", "With --search or --disaggregate"
"""The panels of `plan`'s help."""
MAX_PRICE = 1e5
LEAST_SHARE = 1e-3
"""Of a floor. Less than that is no plan, and far less is no number to divide by."""
A_LENGTH = "from 1 token on"


@dataclass(frozen=True, slots=True)
class DeploymentWish:
    on: tuple[str, ...] = several(
        "texts",
        DEPLOYMENT,
        "h200 (the default), rtx4090, mi300x, m4max, ...; this: this machine, measured. With --search it may be "
        "given several times; default there: all with a public price.",
        metavar="DEVICE",
    )
    tensor_parallel: int = integer(
        1, 1, None, DEPLOYMENT, "Devices that share one copy of the model; each holds a part of every matrix."
    )
    pipeline_parallel: int = integer(
        1, 1, None, DEPLOYMENT, "Stages of one copy, each with its part of the layers, one after another."
    )
    expert_parallel: int = integer(
        1,
        1,
        None,
        DEPLOYMENT,
        "Groups of one copy: each has a part of the experts, everything else whole, and users of its own.",
    )
    count: int | None = integer(
        None,
        1,
        None,
        DEPLOYMENT,
        "Devices in all: a multiple of what a copy takes, the rest are further copies.",
        must_be="a multiple of the devices of a copy, at least one",
    )
    quantise: str | None = text(
        None,
        DEPLOYMENT,
        "bf16, fp8, int8, int4, nvfp4, mxfp4, q8_0, q4_k or another GGUF kind; default: as stored.",
        metavar="KIND",
    )
    kv: str = text("bf16", DEPLOYMENT, "What K and V are kept in: bf16, f16, fp8 or int8.", metavar="KIND")
    price: float | None = number(
        None, 0.0, MAX_PRICE, DEPLOYMENT, "USD an hour of one device; default: the table's.", is_above_low=True
    )
    efficiency: str | None = text(
        None,
        DEPLOYMENT,
        "Your own share of the floor, of both phases or of prefill and decode: 0.6 or 0.5,0.8.",
        metavar="SHARE[,SHARE]",
    )

    @property
    def is_cut(self) -> bool:
        return max(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel, self.count or 1) > 1

    def uncut(self) -> DeploymentWish:
        return replace(self, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1, count=None)

    def own_efficiency(self) -> Efficiency | None:
        if self.efficiency is None:
            return None
        from twostroke.planner.efficiency import FloorShares

        try:
            shares = [float(part) for part in self.efficiency.split(",")]
        except ValueError:
            shares = []
        if len(shares) not in (1, 2) or not all(LEAST_SHARE <= share <= 1 for share in shares):
            raise BadRequestError(
                f"efficiency must be one or two numbers, at least {LEAST_SHARE:g} and at most 1, like 0.5,0.8, "
                f"not {self.efficiency[:40]!r}"
            )
        return FloorShares(
            "as given with --efficiency", "unknown: it was given, not measured", prefill=shares[0], decode=shares[-1]
        )


@dataclass(frozen=True, slots=True)
class LoadWish:
    input_tokens: int = integer(2000, 1, None, LOAD, "Tokens of a prompt.", flag="--input", must_be=A_LENGTH)
    output_tokens: int = integer(500, 1, None, LOAD, "Tokens of an answer.", flag="--output", must_be=A_LENGTH)
    cached_tokens: int = integer(
        0, 0, None, LOAD, "Tokens of a prompt that all users share and the prefix cache holds.", flag="--cached"
    )
    users: int | None = integer(
        None, 1, None, LOAD, "Users at once, each asking again when answered; default: as many as fit."
    )
    rate: float | None = number(None, 0.0, None, SEARCH, "Requests a second, instead of --users.", is_above_low=True)
    slo_ttft_ms: float | None = number(None, 0.0, None, SEARCH, "Mean time to first token, at most.", is_above_low=True)
    slo_tpot_ms: float | None = number(None, 0.0, None, SEARCH, "Mean time per token, at most.", is_above_low=True)

    def lengths(self) -> RequestLengths:
        from twostroke.planner.estimate import checked_lengths

        return checked_lengths(self.input_tokens, self.output_tokens, self.cached_tokens)

    @property
    def is_for_search(self) -> bool:
        return (self.rate, self.slo_ttft_ms, self.slo_tpot_ms) != (None, None, None)

    def level(self) -> ServiceLevel:
        from twostroke.planner.search import ServiceLevel

        limits_ms = (self.slo_ttft_ms, self.slo_tpot_ms)
        return ServiceLevel(*(math.inf if value is None else value / 1e3 for value in limits_ms))


@dataclass(frozen=True, slots=True)
class Wish:
    """A model, and what was asked for it."""

    planned: PlannedModel
    asked: DeploymentWish
    config: EngineConfig
    """Of the engine that is planned."""
    speculating: Speculating | None = None

    def on(self, name: str) -> tuple[Deployment, Efficiency | None]:
        asked = self.asked
        if name == "this":
            from twostroke.planner.asked.here import here

            devices, ranks = asked.pipeline_parallel * asked.expert_parallel, asked.tensor_parallel
            config = replace(self.config, tensor_parallel=ranks)
            deployment, fitted = here(self.planned, asked.quantise, asked.kv, devices, config)
            return replace(deployment, speculating=self.speculating), fitted
        from twostroke.cost.devices import find_device

        deployment = self.at(find_device(name), asked.quantise)
        a_copy = deployment.devices_per_copy
        count = a_copy if asked.count is None else asked.count
        if count % a_copy:
            raise BadRequestError(f"count ({count}) must be a multiple of the {a_copy} devices of a copy, at least one")
        return replace(deployment, replicas=count // a_copy), None

    def at(self, device: Device, quantise: str | None) -> Deployment:
        """Brought to `quantise`; None: as its files have it."""
        from twostroke.planner.asked.deployed import deployed, with_copies

        asked = self.asked
        if asked.price is not None:
            device = replace(device, price_per_hour_usd=asked.price)
        deployment = deployed(
            self.planned,
            device,
            quantise=quantise,
            kv=asked.kv,
            tensor_parallel=asked.tensor_parallel,
            pipeline_parallel=asked.pipeline_parallel,
            expert_parallel=asked.expert_parallel,
            speculating=self.speculating,
        )
        return with_copies(deployment, self.planned, quantise, self.config)
