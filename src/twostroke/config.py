"""What a user may choose, composed and frozen, and how it is resolved once against a model and a machine. Every choice
that was left open comes back with its reason. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import ARITHMETICS, KV_BITS, WEIGHT_FORMATS
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.core.units import size
from twostroke.machine import MemorySpace

MAX_BLOCK_SIZE = 256
KV_KINDS = ("auto", *KV_BITS)
"""What K and V may be kept in. A backend may decline a kind; `auto` is its own choice."""
LIMITS = {"threads": 1024, "max_context": 2**31 - 1, "max_tokens_per_step": 2**16, "max_running": 2**16}
"""The most that may be asked for: beyond it a slip of the finger, and memory for buffers that no step would fill."""
QUANTISE_CHOICES = ("none", *WEIGHT_FORMATS)
DTYPE_CHOICES = ("auto", *ARITHMETICS)
"""A backend may decline a kind that it does not have, with a sentence."""
KV_MEMORY_OPTION = "--kv-memory, or KVConfig(memory_bytes=...)"
LOAD_CHOICES = ("file", "random")
DECODE_WEIGHTS_CHOICES = ("auto", "packed", "plain")


@dataclass(frozen=True, slots=True)
class KVConfig:
    block_size: int | None = None
    """Tokens in a block; None: what suits the backend."""
    memory_bytes: int | None = None
    """Bytes for all KV blocks; None: a share of what is free."""
    prefix_caching: bool = True
    kind: str = "auto"
    """One of KV_KINDS. int8 takes about half of the memory, and a little of the quality."""

    def __post_init__(self) -> None:
        if self.kind not in KV_KINDS:
            raise BadRequestError(f"the KV kind must be one of {', '.join(KV_KINDS)}, not {self.kind!r:.60}")
        if self.memory_bytes is not None and not (_is_integer(self.memory_bytes) and self.memory_bytes > 0):
            raise BadRequestError(
                f"memory_bytes must be a whole number of bytes, like 2 * 10**9, not {self.memory_bytes!r:.60}"
            )
        if self.block_size is not None and (
            not _is_integer(self.block_size) or self.block_size % 16 or not 16 <= self.block_size <= MAX_BLOCK_SIZE
        ):
            raise BadRequestError(
                f"block_size must be a multiple of 16 up to {MAX_BLOCK_SIZE}, not {self.block_size!r:.60}"
            )
        _check_switch("prefix_caching", self.prefix_caching)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    backend: str = "auto"
    threads: int | None = None
    max_context: int | None = None
    """Tokens of prompt and answer together; None: what the model was trained for, as far as memory allows."""
    max_tokens_per_step: int | None = None
    """The step's token budget: bounds how long a step with prefill chunks keeps the running streams waiting. None: what
    suits the backend."""
    max_running: int | None = None
    """Streams that run at a time; None: what suits the backend."""
    itl_target_ms: float | None = None
    """Beside running streams, a step takes no more prefill than should keep it this short; None: what suits the
    backend."""
    run_ahead: bool = True
    """Schedule one step ahead of the results, so that neither host nor device waits for the other."""
    kv: KVConfig = field(default_factory=KVConfig)
    quantise: str | None = None
    """What float matrices are brought to as they are loaded, of QUANTISE_CHOICES; None: chosen by backend and memory.
    Weights that are stored quantised stay as they are."""
    dtype: str = "auto"
    """Of DTYPE_CHOICES: which 16-bit floats a backend that has them computes in; "auto": as the weights are stored."""
    load: str = "file"
    """Of LOAD_CHOICES. "random": a folder with config.json alone gives the shape, and the weights are drawn."""
    decode_weights: Literal["auto", "packed", "plain"] = "auto"
    """Decode does little but read weights, prefill mostly multiplies. "packed": a second copy of them in 12 bits, which
    steps of few tokens read; "plain": both phases read the same; "auto": packed where it can be had and leaves
    enough memory for KV."""

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_integer(value) or not 1 <= value <= limit:
                raise BadRequestError(f"{name} must be an integer from 1 to {limit}, not {value!r:.60}")
        if not isinstance(self.backend, str):
            raise BadRequestError(f"backend must be a name, like 'cpu', not {self.backend!r:.60}")
        if not isinstance(self.kv, KVConfig):
            raise BadRequestError(f"kv must be a KVConfig, like KVConfig(kind='int8'), not {self.kv!r:.60}")
        _check_switch("run_ahead", self.run_ahead)
        offered = (
            ("quantise", (None, *QUANTISE_CHOICES)),
            ("dtype", DTYPE_CHOICES),
            ("load", LOAD_CHOICES),
            ("decode_weights", DECODE_WEIGHTS_CHOICES),
        )
        for name, choices in offered:
            value = getattr(self, name)
            if value not in choices:
                raise BadRequestError(f"{name} must be one of {', '.join(filter(None, choices))}, not {value!r:.60}")
        target = self.itl_target_ms
        is_number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if target is not None and not (is_number and 0.0 < target < float("inf")):
            raise BadRequestError(f"itl_target_ms must be a number above 0, not {target!r:.60}")


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig, for whoever passes them on by name: a type checker finds a slip in one."""

    backend: str
    threads: int | None
    max_context: int | None
    max_tokens_per_step: int | None
    max_running: int | None
    itl_target_ms: float | None
    run_ahead: bool
    kv: KVConfig
    quantise: str | None
    dtype: str
    load: str
    decode_weights: Literal["auto", "packed", "plain"]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be True or False, not {value!r:.60}")


@dataclass(frozen=True, slots=True)
class KVGroupNeed:
    """What one KV group of a model asks for: its layers, its window, its bytes a token on the chosen backend."""

    layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int


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


def resolve(
    config: EngineConfig,
    model_max_context: int,
    groups: tuple[KVGroupNeed, ...],
    memory: MemorySpace,
    suits: StepSizes,
    machine_threads: int,
    short_rope_context: int | None = None,
) -> ResolvedConfig:
    """Fill in what was left open, sizes by what `suits` the backend. Raises when what was asked for cannot be had, with
    what would fit. `short_rope_context`: beyond it a model reads every prompt with other rope factors, so it is only
    exceeded when that is asked for."""
    reasons: list[str] = []
    threads = config.threads or machine_threads
    reasons.append(f"{threads} threads: " + ("asked for" if config.threads else "the cores this process may use"))
    sizes = StepSizes(
        config.kv.block_size or suits.block_size,
        config.max_tokens_per_step or suits.max_tokens_per_step,
        config.max_running or suits.max_running,
        config.itl_target_ms or suits.itl_target_ms,
    )
    max_context = config.max_context or short_rope_context or model_max_context
    if max_context > model_max_context:
        raise BadRequestError(f"max_context {max_context} is more than the {model_max_context} this model was made for")
    budget, why = _kv_budget(config, memory)
    block_bytes = sizes.block_size * sum(group.bytes_per_token for group in groups)
    fits = _fitting_context(sizes, groups, budget, max_context)
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
    layout = _layout(sizes, groups, budget, max_context)
    kv_bytes = sum(g.num_blocks * need.bytes_per_token for g, need in zip(layout.groups, groups, strict=True))
    kv_bytes *= sizes.block_size
    blocks = " + ".join(str(group.num_blocks) for group in layout.groups)
    reasons.append(f"KV {blocks} blocks of {sizes.block_size} tokens, {size(kv_bytes)}: {why}")
    return ResolvedConfig(
        replace(config, threads=threads), threads, max_context, sizes, layout, kv_bytes, tuple(reasons), warnings
    )


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


def sequence_bytes(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], context: int) -> int:
    """KV that one sequence of this context holds at most."""
    return sum(_group_tokens(sizes, group, context) * group.bytes_per_token for group in groups)


def _group_tokens(sizes: StepSizes, group: KVGroupNeed, context: int) -> int:
    """Tokens of KV that one sequence of this context holds at most: behind a window, blocks are given back."""
    tokens = context
    if group.window is not None:
        tokens = min(context, group.window + 2 * sizes.max_tokens_per_step + sizes.block_size)
    return -(-tokens // sizes.block_size) * sizes.block_size


def _fitting_context(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], budget: int, context: int) -> int:
    """The longest context, up to `context`, of which one sequence fits in the budget."""
    low, high = 0, context
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(sizes, groups, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _layout(sizes: StepSizes, groups: tuple[KVGroupNeed, ...], budget: int, max_context: int) -> KVLayout:
    """Blocks for as many full-length sequences as the budget holds, up to all that may run."""
    size = sizes.block_size
    one = [_group_tokens(sizes, group, max_context) for group in groups]
    one_bytes = sum(tokens * group.bytes_per_token for tokens, group in zip(one, groups, strict=True))
    sequences = max(1.0, min(float(sizes.max_running), budget / one_bytes))
    return KVLayout(
        block_size=size,
        groups=tuple(
            KVGroup(group.layers, group.window, num_blocks=int(sequences * tokens) // size)
            for tokens, group in zip(one, groups, strict=True)
        ),
    )
