"""From what the hardware allows to what is to be expected of it: what share of each limit real steps have reached,
where that was measured, and how far predictions made with it were off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from twostroke.cost.floor import StepWork, step_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.step_cost import Coefficients, StepTerms
from twostroke.planner.form_factors import PLAIN, FormFactors, form_factors


class Efficiency(Protocol):
    @property
    def source(self) -> str:
        """Where it was measured."""

    @property
    def error(self) -> str:
        """How far predictions made with it were off, measured, or that nobody has measured it."""

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float: ...

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        """What a prompt takes beside its steps where nobody else is served, if that was measured; else 0."""


class _Steps:
    """Of an efficiency that knows steps alone: nobody measured what a prompt takes beside them."""

    __slots__ = ()

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Floor(_Steps):
    """All of every limit: what physics allows, which nobody reaches."""

    source: str = "1.0: the floor itself"
    error: str = "none: a floor is a bound, not a prediction"

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
        return step_floor_s(shape, work, ceilings)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The cost model with coefficients from records of several models on one device, over its data sheet. They are kept
    so that they carry over to other models: overheads by the layer, and the experts' products apart."""

    source: str
    error: str
    layer_s: float
    """Norms, rotation and the waits between kernels: of a layer, whatever its size."""
    expert_layer_s: float
    """Choosing experts and gathering their rows: of a layer that has them, on top."""
    newcomer_s: float
    """What a prompt takes beside its steps where nobody else is served."""
    weights_alone: float
    """This and all that follow: seconds for each second of the part's floor, as `Coefficients` has them."""
    weights: float
    matmul: float
    expert_matmul: float
    """In place of `matmul` for experts, whose rows come in small groups."""
    attention: float
    kv: float
    sampled: float
    form: FormFactors = PLAIN
    """Of the weights, where they are in few bits."""

    def coefficients(self, shape: ModelShape, ceilings: Ceilings) -> Coefficients:
        return _coefficients(self, *_sizes(shape), ceilings.read_bytes_per_s)

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
        return StepTerms(shape, ceilings).seconds(work, _factors(self, *_sizes(shape), ceilings.read_bytes_per_s))

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return self.newcomer_s


def _sizes(shape: ModelShape) -> tuple[int, float | None, int]:
    """How many layers a model has, of experts their share of the layers' multiply-adds, and all parameters."""
    num_layers = sum(group.num_readers for group in shape.kv_groups)
    in_experts = None if shape.experts is None else shape.experts.active_parameters / shape.layer_matmul_parameters
    return num_layers, in_experts, shape.num_parameters


@lru_cache(maxsize=64)
def _factors(
    recorded: Recorded, num_layers: int, in_experts: float | None, num_parameters: int, read_bytes_per_s: float
) -> tuple[float, ...]:
    """A search or a simulation asks for many thousands of steps."""
    return _coefficients(recorded, num_layers, in_experts, num_parameters, read_bytes_per_s).factors


def _coefficients(
    recorded: Recorded, num_layers: int, in_experts: float | None, num_parameters: int, read_bytes_per_s: float
) -> Coefficients:
    form = recorded.form
    expert_layer_s = 0.0 if in_experts is None else recorded.expert_layer_s + form.expert_layer_s
    share = in_experts or 0.0
    return Coefficients(
        step_s=num_layers * (recorded.layer_s + expert_layer_s),
        prefill_s=form.unpacking_bytes * num_parameters / read_bytes_per_s,
        weights_alone=recorded.weights_alone * form.weights,
        weights=recorded.weights * form.weights,
        # So that a step bound by arithmetic costs its arithmetic alone, and no more for being cut in two.
        matmul_in_shadow=max(0.0, recorded.matmul - recorded.weights),
        matmul=(1.0 - share) * recorded.matmul + share * recorded.expert_matmul * form.expert_matmul,
        attention=recorded.attention,
        kv=recorded.kv,
        sampled=recorded.sampled,
    )


@dataclass(frozen=True, slots=True)
class FloorShares(_Steps):
    """One share of the floor for each phase: what a running server, or a guess, can tell."""

    source: str
    error: str
    prefill: float
    decode: float

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
        prefill = replace(work, contexts=(), queries=())
        decode = StepWork(contexts=work.contexts, queries=work.queries)
        return (
            step_floor_s(shape, prefill, ceilings) / self.prefill + step_floor_s(shape, decode, ceilings) / self.decode
        )


@dataclass(frozen=True, slots=True)
class Fitted:
    """A cost model fitted to steps of this very model on this very machine; it has its own shape and ceilings."""

    source: str
    error: str
    seconds: Callable[[StepWork], float]
    newcomer: Callable[[int], float] = lambda prompt_tokens: 0.0
    """Of the tokens of a prompt: what it takes beside its steps."""

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
        return self.seconds(work)

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return self.newcomer(prompt_tokens)


H200_RECORDS = Recorded(
    source="one H200 running Llama-3.1-8B, Qwen3-0.6B and Qwen3-30B-A3B in bf16, with and without copies in 12 bits "
    "for decode (bench/results/cuda-bench.txt, cuda-step-profile.txt; attention and experts: cuda-attention.txt, "
    "cuda-moe.txt)",
    error="6.4% on average over 26 figures measured there (decode step 8.2%, TTFT 2.5%, TPOT 5.3%, tokens/s 0.3%), "
    "the worst 31%; 8% to 19% on a model that was left out of the fit",
    layer_s=14.7e-6,
    expert_layer_s=14.4e-6,
    newcomer_s=3.64e-3,
    weights_alone=1.158,
    weights=1.195,
    matmul=1.35,
    expert_matmul=2.04,
    attention=1.558,
    kv=1.407,
    sampled=1.333,
)
"""Over the data sheet's numbers. `python -m bench.plan_error` fits it anew and prints each error."""


CPU_RECORDS = FloorShares(
    source="SmolLM2-135M on two cores with AVX512 (bench/results/cpu-2026-11-15-1436.md), one request at a time",
    error="6% on average over the four figures measured there; 16 streams at once reached less of the floor than one "
    "(43%); `--from-server` and `twostroke calibrate` measure your own",
    prefill=0.54,
    decode=0.615,
)
"""Shares of the ceilings that this machine was measured to have."""


LARGEST_MEASURED = 31 * 10**9
"""Parameters: Qwen3-30B-A3B was the largest of H200_RECORDS."""


def expected(
    device_name: str,
    *,
    cuts: Sequence[str] = (),
    weights: str = "bf16",
    has_experts: bool = False,
    arithmetic: str = "bf16",
    num_parameters: int = 0,
) -> Recorded:
    """The records' shares, and a word on how far they are from what is planned. `cuts`: kinds of parallelism."""
    apart = []
    form, doubt = form_factors(weights, has_experts=has_experts)
    records = replace(H200_RECORDS, form=form)
    if num_parameters > LARGEST_MEASURED:
        apart.append(f"{num_parameters / 1e9:,.0f}B parameters are larger than any measured (0.6B to 30B)")
    if device_name != "H200":
        apart.append(f"no {device_name} was measured: its data sheet is taken by the shares that an H200 reached")
    if doubt is not None:
        apart.append(doubt)
    elif arithmetic != "bf16":
        apart.append(f"{arithmetic} arithmetic was not measured")
    apart.extend(f"{cut} parallelism was not measured" for cut in cuts)
    if not apart:
        return records
    return replace(records, error=f"unknown: {'; '.join(apart)} (on the H200, in 16 and 12 bits: {H200_RECORDS.error})")
