"""What a user may choose, composed and frozen, and how it is resolved once against a model and a machine. Every choice
that was left open comes back with its reason. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import ARITHMETICS, WEIGHT_FORMATS
from twostroke.core.kv_config import FORMATS
from twostroke.core.kv_config import KVConfig as KVConfig
from twostroke.core.kv_layout import KVGroupNeed, KVLayout
from twostroke.core.kv_room import fitting_context, kv_layout_within, sequence_bytes
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.core.service_level_file import read_service_levels
from twostroke.core.setting import check_settings, choice, integer, number, switch, text
from twostroke.core.step_sizes import StepSizes
from twostroke.core.units import size
from twostroke.machine import MemorySpace

KV_MEMORY_OPTION = "--kv-memory, or KVConfig(memory_bytes=...)"
QUANTISE_CHOICES = ("none", *WEIGHT_FORMATS)
DTYPE_CHOICES = ("auto", *ARITHMETICS)
"""A backend declines what it does not have, with a sentence."""

POLICIES = ("fifo", "slack", "fair")
"""As `scheduling/policies` has them."""

ENGINE = "Engine"
"""A panel of a command's help, beside KV's."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    backend: str = text(
        "auto",
        ENGINE,
        "auto, cuda (an NVIDIA GPU; needs the extra [cuda]), cpu (native code, quantised weights), or reference "
        "(numpy, slow, written to be read).",
        must_be="a name, like 'cpu'",
    )
    threads: int | None = integer(None, 1, 1024, ENGINE, "Threads; default: the cores this process may really use.")
    max_context: int | None = integer(
        None,
        1,
        2**31 - 1,
        ENGINE,
        "Prompt and answer together, in tokens; default: what the model was made for, as far as memory allows. A "
        "model with two sets of rope factors (Phi-3) reads every prompt with the long set once this is above the "
        "short set's length, which is its default.",
    )
    max_tokens_per_step: int | None = integer(
        None,
        1,
        2**16,
        ENGINE,
        "The most tokens that a step computes. Smaller: smoother streams. Larger: faster prompts. Default: chosen "
        "for the backend.",
    )
    max_running: int | None = integer(
        None, 1, 2**16, ENGINE, "The most streams that run at a time; default: chosen for the backend."
    )
    itl_target_ms: float | None = number(
        None,
        0.0,
        None,
        ENGINE,
        "The gap between tokens to aim for. While streams run, a step reads only as much of other prompts as keeps "
        "it about this short. Smaller: smoother streams. Larger: faster prompts. Default: 35 on cuda; elsewhere "
        "--max-tokens-per-step decides.",
        is_above_low=True,
    )
    policy: str = choice(
        "fair",
        POLICIES,
        ENGINE,
        "Which request is served next. fair: API keys share the engine by the seconds that they use, and of one "
        "key's requests the one that is due first; slack: the request that is due first, of any key; fifo: in order "
        "of arrival.",
        metavar="fifo|slack|fair",
    )
    service_levels: str | None = text(
        None,
        ENGINE,
        "A TOML file that says what each class of requests is promised: a table [levels.NAME] for each class, with "
        "ttft_ms, itl_ms, weight and when_late (queue or refuse). Default: one class, which promises what this "
        "hardware reaches when it is not overloaded.",
        must_be="the path of a TOML file",
        metavar="FILE",
    )
    tensor_parallel: int = integer(
        1,
        1,
        64,
        ENGINE,
        "Ranks that hold one copy of the model together. Each is a process with a part of every matrix and of the "
        "KV: on cpu for machines with several sockets, on reference to try it, on cuda with a GPU each.",
        metavar="N",
    )
    rank_transport: Literal["nccl", "gloo"] | None = choice(
        None,
        ("nccl", "gloo"),
        ENGINE,
        "How ranks on GPUs exchange their sums: nccl, from GPU to GPU; or gloo, through the host, which is slow but "
        "lets ranks share a GPU. Default: nccl, and an error if there is no GPU for each rank.",
        metavar="nccl|gloo",
    )
    run_ahead: bool = switch(
        True, ENGINE, "Schedule one step ahead of the results, so that neither host nor device waits for the other."
    )
    check_steps: bool = switch(
        False, ENGINE, "Prove after every step that no KV block and no request was lost. For tests: it takes time."
    )
    speculate: str = text(
        "auto",
        ENGINE,
        "What guesses tokens ahead, so that the model can verify several in a step: auto (look them up in the prompt "
        "and the answer), off, a method by name, draft:MODEL (a smaller model with the same tokenizer), "
        "eagle3:FOLDER (a head trained for this model), or mtp (a layer of the model's own files that guesses). "
        "Answers are the same, and drafts are only computed where they pay.",
        must_be="a method's name, auto or off",
    )
    kv: KVConfig = field(default_factory=KVConfig)
    quantise: str | None = choice(
        None,
        QUANTISE_CHOICES,
        FORMATS,
        "Quantise float weights on load: to q8_0, q4_1, int4 or fp8, or none. Default: chosen for the backend; on "
        "cpu q8_0, on cuda none, or fewer bits if memory is short. Weights that are stored quantised stay as they "
        "are. Exception: on GPUs before Hopper they are brought to bf16, unless none is asked for or memory is short.",
        metavar="KIND",
    )
    memory_gb: float | None = number(
        None,
        0.0,
        None,
        FORMATS,
        "Weights, KV and all else together may take this many GB of the device's memory; default: all that is free.",
        is_above_low=True,
    )
    dtype: str = choice(
        "auto",
        DTYPE_CHOICES,
        FORMATS,
        "The arithmetic: bf16 or f16 on cuda, f32 on reference; fp8 on cuda: prompts are multiplied in fp8 if the "
        "weights are in few bits; auto: on cuda as the weights are stored, or bf16 if they are stored in neither.",
        metavar="KIND",
    )
    load: str = choice(
        "file",
        ("file", "random"),
        FORMATS,
        "random: weights drawn at random for a folder with config.json, for benchmarks (no text).",
        metavar="file|random",
    )
    decode_weights: Literal["auto", "packed", "plain"] = choice(
        "auto",
        ("auto", "packed", "plain"),
        FORMATS,
        "Which weights steps of few tokens, like those of decode, read on cuda. packed: a second copy in 12 bits, a "
        "quarter less to read (some of the smallest weights are off, by at most 2^-22 of their row's largest); "
        "plain: the weights themselves, which leaves more memory for KV; auto: packed, if enough memory is left.",
        metavar="FORM",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not isinstance(self.kv, KVConfig):
            raise BadRequestError(f"kv must be a KVConfig, like KVConfig(kind='int8'), not {self.kv!r:.60}")

    def promised(self) -> ServiceLevels:
        """The classes of requests, read from their file. Raises BadRequestError for one that cannot be read."""
        if self.service_levels is not None:
            return read_service_levels(self.service_levels)
        return ServiceLevels((ServiceLevel(DEFAULT_LEVEL, is_derived=True),))


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig, for whoever passes them on by name: a type checker finds a slip in one."""

    backend: str
    threads: int | None
    max_context: int | None
    max_tokens_per_step: int | None
    max_running: int | None
    itl_target_ms: float | None
    policy: str
    service_levels: str | None
    tensor_parallel: int
    rank_transport: Literal["nccl", "gloo"] | None
    run_ahead: bool
    check_steps: bool
    speculate: str
    kv: KVConfig
    quantise: str | None
    memory_gb: float | None
    dtype: str
    load: str
    decode_weights: Literal["auto", "packed", "plain"]


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    config: EngineConfig
    threads: int
    max_context: int
    sizes: StepSizes
    layout: KVLayout
    kv_bytes: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """Of the reasons, those that change answers: they are said at every start."""

    @property
    def kv_tokens(self) -> int:
        """That all sequences together may hold, behind no window."""
        return self.layout.groups[0].num_blocks * self.layout.block_size


def sizes_asked(config: EngineConfig, suits: StepSizes) -> StepSizes:
    """What was asked for, and what suits the backend where nothing was."""
    return StepSizes(
        config.kv.block_size or suits.block_size,
        config.max_tokens_per_step or suits.max_tokens_per_step,
        config.max_running or suits.max_running,
        config.itl_target_ms or suits.itl_target_ms,
    )


def resolve(
    config: EngineConfig,
    model_max_context: int,
    groups: tuple[KVGroupNeed, ...],
    memory: MemorySpace,
    suits: StepSizes,
    machine_threads: int,
    short_rope_context: int | None = None,
    reads_whole: bool = False,
) -> ResolvedConfig:
    """Fill in what was left open, sizes by what `suits` the backend. Raises when what was asked for cannot be had, with
    what would fit. `short_rope_context`: beyond it a model reads every prompt with other rope factors, so it is only
    exceeded when that is asked for. `reads_whole`: prompts are read in one step each, and their KV does not outlive
    it."""
    reasons: list[str] = []
    threads = config.threads or machine_threads
    reasons.append(f"{threads} threads: " + ("asked for" if config.threads else "the cores this process may use"))
    sizes = sizes_asked(config, suits)
    max_context = config.max_context or short_rope_context or model_max_context
    if max_context > model_max_context:
        raise BadRequestError(f"max_context {max_context} is more than the {model_max_context} this model was made for")
    if reads_whole:
        if config.max_tokens_per_step is None:
            sizes = replace(sizes, max_tokens_per_step=max(sizes.max_tokens_per_step, max_context))
        max_context = min(max_context, sizes.max_tokens_per_step)
    budget, why = _kv_budget(config, memory)
    if reads_whole:  # of the step that is computed and the one that is prepared, each prompt in blocks of its own
        most = 2 * (sizes.max_tokens_per_step + sizes.max_running * sizes.block_size)
        budget = min(budget, max(most, max_context) * sum(group.bytes_per_token for group in groups))
        why = "for the texts of two steps"
    block_bytes = sizes.block_size * sum(group.bytes_per_token for group in groups)
    fits = fitting_context(sizes, groups, budget, max_context)
    if fits < min(max_context, sizes.block_size * 2):
        raise BadRequestError(
            f"{size(budget)} for KV ({why}) hold less than two blocks of {sizes.block_size} tokens "
            f"({size(block_bytes)} each): give more memory to KV ({KV_MEMORY_OPTION})"
        )
    if fits < max_context:
        if config.max_context is not None:
            need = sequence_bytes(sizes, groups, max_context)
            raise BadRequestError(
                f"a context of {max_context} needs {size(need)} of KV, and {size(budget)} are there ({why}): {fits} "
                "would fit"
            )
        reasons.append(f"context {fits}: what {size(budget)} of KV hold of the model's {model_max_context}")
        max_context = fits
    else:
        reasons.append(f"context {max_context}: {_why_context(config, model_max_context, short_rope_context)}")
    warnings = _rope_warnings(max_context, short_rope_context)
    reasons += warnings
    layout = kv_layout_within(replace(sizes, max_running=2**31) if reads_whole else sizes, groups, budget, max_context)
    kv_bytes = sum(
        layout.positions(group) * need.bytes_per_token for group, need in zip(layout.groups, groups, strict=True)
    )
    reasons.append(f"KV {_described(layout)}, {size(kv_bytes)}: {why}")
    return ResolvedConfig(
        replace(config, threads=threads), threads, max_context, sizes, layout, kv_bytes, tuple(reasons), warnings
    )


def _described(layout: KVLayout) -> str:
    blocks = " + ".join(str(group.num_blocks) for group in layout.groups if not group.is_state)
    slots = " + ".join(str(group.num_blocks) for group in layout.groups if group.is_state)
    parts = [f"{blocks} blocks of {layout.block_size} tokens"] if blocks else []
    return " and ".join([*parts, f"{slots} slots for states"] if slots else parts)


def _why_context(config: EngineConfig, model_max_context: int, short_rope_context: int | None) -> str:
    if config.max_context is not None:
        return "asked for"
    if short_rope_context is None:
        return "what the model was made for"
    return (
        f"as far as the model's short rope factors reach; up to {model_max_context} can be asked for (--max-context), "
        "and is read with the long ones"
    )


def _rope_warnings(max_context: int, short_rope_context: int | None) -> tuple[str, ...]:
    if short_rope_context is None or max_context <= short_rope_context:
        return ()
    return (
        f"long rope factors: the context is above {short_rope_context}, so every prompt is read with them; short "
        f"prompts are answered as the model was trained to with a context of up to {short_rope_context} only",
    )


def _kv_budget(config: EngineConfig, memory: MemorySpace) -> tuple[int, str]:
    if config.kv.memory_bytes is not None:
        if config.kv.memory_bytes > memory.total_bytes:
            asked, there = size(config.kv.memory_bytes), size(memory.total_bytes)
            raise BadRequestError(
                f"{asked} for KV are more than the {there} {memory.owner} has: ask for less ({KV_MEMORY_OPTION})"
            )
        return config.kv.memory_bytes, "asked for"
    why = f"at most {memory.kv_share:.0%} of the memory of {memory.owner} left beside the weights"
    return int(memory.free_beside_weights_bytes * memory.kv_share), why
