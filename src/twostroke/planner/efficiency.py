"""From what the hardware allows to what is to be expected of it: what share of each limit real steps have reached,
where that was measured, and how far predictions made with it were off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from twostroke.cost.floor import StepWork, contexts_bytes_read, step_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape


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


@dataclass(frozen=True, slots=True)
class Floor:
    """All of every limit: what physics allows, which nobody reaches."""

    source: str = "1.0: the floor itself"
    error: str = "none: a floor is a bound, not a prediction"

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
        return step_floor_s(shape, work, ceilings)

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class TermEfficiency:
    """The share of the data sheet's peak, or of its bandwidth, that each kind of work reaches, and what a layer costs
    beside its matrices. Terms add up: kernels run one after another, each bound by its own limit."""

    source: str
    error: str
    matmul: float
    """Of the peak, in matrix products of many rows."""
    expert_matmul: float
    """The same in experts, whose rows come in small groups."""
    prefill_attention: float
    """Of the peak, in the attention of a chunk."""
    single_weight_reads: float
    """Of the bandwidth, where a product of one row is bound by its weights."""
    weight_reads: float
    """The same of several rows."""
    packed_reads: float
    """The same of copies in 12 bits, whatever the rows: unpacking them takes its time too."""
    kv_reads: float
    """Of the bandwidth, in decode's attention."""
    layer_s: float
    """Norms, rotation and the waits between kernels: a layer, whatever its size."""
    expert_layer_s: float
    """Choosing experts and gathering their rows: a layer that has them, on top."""
    chunk_layer_s: float
    """The least that a layer takes in a step with a chunk, whose kernels the host launches one by one."""

    def step_seconds(self, shape: ModelShape, work: StepWork, ceilings: Ceilings) -> float:
        count = work.num_tokens
        if count == 0:
            return 0.0
        peak, bandwidth = ceilings.multiply_adds_per_s, ceilings.read_bytes_per_s
        num_layers = sum(group.num_layers for group in shape.kv_groups)
        expert_parameters = shape.experts.active_parameters if shape.experts else 0
        num_sampled = work.num_queries + work.num_sampling_chunks
        dense = (shape.layer_matmul_parameters - expert_parameters) * count
        dense += shape.head_matmul_parameters * num_sampled
        weight_rate = bandwidth * (self.single_weight_reads if count == 1 else self.weight_reads)
        copy_rate = bandwidth * self.packed_reads
        copied, plain = shape.expected_dense_reads(count)
        seconds = max(dense / (peak * self.matmul), copied / copy_rate + plain / weight_rate)
        if shape.experts is not None:
            of_copies = shape.expert_copies_read(count)
            read_s = of_copies / copy_rate + (shape.expert_bytes_read(count) - of_copies) / weight_rate
            seconds += max(expert_parameters * count / (peak * self.expert_matmul), read_s)
            seconds += num_layers * self.expert_layer_s
        for start, num_tokens in work.chunks:
            seconds += max(
                shape.attention_multiply_adds(start, num_tokens) / (peak * self.prefill_attention),
                (shape.kv_bytes_read(start) if start else 0) / (bandwidth * self.kv_reads),
            )
        read = contexts_bytes_read(shape, work.contexts)
        seconds += read / (bandwidth * self.kv_reads) + num_layers * self.layer_s
        return max(seconds, num_layers * self.chunk_layer_s) if work.chunks else seconds

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class FloorShares:
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

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return 0.0


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


H200_RECORDS = TermEfficiency(
    source="one H200 running Llama-3.1-8B, Qwen3-0.6B and Qwen3-30B-A3B in bf16, with and without copies in 12 bits "
    "for decode (bench/results/cuda-bench.txt, cuda-step-profile.txt; attention and experts: cuda-attention.txt, "
    "cuda-moe.txt)",
    error="7.5% on average over 26 figures measured there (decode step 7.5%, TTFT 9.5%, TPOT 5.7%, tokens/s 5.2%), "
    "the worst 31%; 12% to 18% on a model that was left out of the fit",
    matmul=0.66,
    expert_matmul=0.49,
    prefill_attention=0.642,
    single_weight_reads=0.888,
    weight_reads=0.834,
    packed_reads=0.769,
    kv_reads=0.706,
    layer_s=14.7e-6,
    expert_layer_s=14.4e-6,
    chunk_layer_s=167e-6,
)
"""Shares of the data sheet's numbers. `python -m bench.plan_error` fits it anew and prints each error."""


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
    device_name: str, *, cuts: Sequence[str] = (), arithmetic: str = "bf16", num_parameters: int = 0
) -> TermEfficiency:
    """The records' shares, and a word on how far they are from what is planned. `cuts`: kinds of parallelism."""
    apart = []
    if num_parameters > LARGEST_MEASURED:
        apart.append(f"{num_parameters / 1e9:,.0f}B parameters are larger than any measured (0.6B to 30B)")
    if device_name != "H200":
        apart.append(f"no {device_name} was measured: its data sheet is taken by the shares that an H200 reached")
    if arithmetic != "bf16":
        apart.append(f"{arithmetic} arithmetic was not measured")
    apart.extend(f"{cut} parallelism was not measured" for cut in cuts)
    if not apart:
        return H200_RECORDS
    return replace(H200_RECORDS, error=f"unknown: {'; '.join(apart)} (on the H200: {H200_RECORDS.error})")
