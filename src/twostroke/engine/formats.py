"""Which formats a model is run in: chosen here alone, by what was asked for, what the backend has, and what fits.
Whether there are copies for decode shows once KV is counted (`decode_weights.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twostroke.backends.interface import BackendFactory
from twostroke.config import EngineConfig, sizes_asked
from twostroke.core.errors import BackendError
from twostroke.core.formats import GPU_FLOATS, STORED, Formats, FormatWish
from twostroke.core.kv_layout import KVGroupNeed
from twostroke.core.kv_room import sequence_bytes
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.model_shape import ModelShape
from twostroke.engine.meant_formats import otherwise
from twostroke.engine.shape import shape_of
from twostroke.engine.vectors import sizes_for
from twostroke.machine import Machine, MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.features import ABSORBS_CONTEXT

GB = 1e9
LEAST_KV_TOKENS = 32768
"""KV for this many tokens, or for a context that was asked for and is longer, must be left beside weights: less serves
a few short conversations."""
LEAST_STEP_TOKENS = 2048
"""Steps are not made smaller than this for the sake of KV: prompts would be read slower."""
SHARE_OF_MEMORY = 0.6
"""Of what is free: weights beyond it leave too little for KV and the rest of the machine."""


@dataclass(frozen=True, slots=True)
class Choice:
    checkpoint: Checkpoint
    factory: BackendFactory
    backend_reason: str
    formats: Formats
    sizes: StepSizes
    memory: MemorySpace
    steps_reason: str | None = None
    """Why steps are smaller than what suits the backend."""

    @property
    def kv_needs(self) -> tuple[KVGroupNeed, ...]:
        return kv_needs(self.factory, self.checkpoint, self.formats)

    @property
    def shape(self) -> ModelShape:
        def held_bytes(name: str) -> int:
            return self.factory.held_bytes(self.checkpoint, name, self.formats)

        found = shape_of(self.checkpoint, [need.bytes_per_token for need in self.kv_needs], held_bytes)
        return found.with_contexts_absorbed() if self.factory.name in ABSORBS_CONTEXT else found


def format_wish(config: EngineConfig, checkpoint: Checkpoint) -> FormatWish:
    """What was asked for, before any backend has a word in it."""
    weights, _ = asked_weights(config.quantise, checkpoint)
    return FormatWish(weights, _open(config.dtype), _open(config.kv.kind))


def choose_formats(
    config: EngineConfig, checkpoint: Checkpoint, here: Machine, factory: BackendFactory, backend_reason: str
) -> Choice:
    """Raises BackendError where the backend does not have what was asked for."""
    weights, reason = asked_weights(config.quantise, checkpoint)
    if weights is None and config.load == "file":
        weights, reason = preferred(factory.preferred_weights, checkpoint, here)
    offered = factory.preferred_weights
    if weights == STORED and offered and config.quantise not in ("none", *offered):
        weights = config.quantise  # there is nothing to bring to it, and it is not to be had: the backend says so
    found = factory.formats(checkpoint, replace(format_wish(config, checkpoint), weights=weights))
    if isinstance(found, str):
        raise BackendError(f"the {factory.name} backend does not have what was asked for: {found}")
    reasons = (*([] if reason is None else [reason]), *found.reasons, *otherwise(checkpoint, found))
    formats = replace(found, reasons=reasons)
    choice = _choice(config, checkpoint, here, factory, backend_reason, formats)
    return choice if config.quantise is not None else that_fits(choice, config, here)


def _choice(
    config: EngineConfig,
    checkpoint: Checkpoint,
    here: Machine,
    factory: BackendFactory,
    backend_reason: str,
    formats: Formats,
) -> Choice:
    """In the largest steps that leave KV enough memory, or in the smallest that there are."""
    limit_bytes = None if config.memory_gb is None else config.memory_gb * GB

    def in_steps_of(sizes: StepSizes) -> Choice:
        memory = factory.memory(checkpoint, here, formats, sizes).within(limit_bytes)
        return Choice(checkpoint, factory, backend_reason, formats, sizes, memory)

    sizes = sizes_asked(config, sizes_for(checkpoint, factory.suits))
    first = found = in_steps_of(sizes)
    is_open = config.max_tokens_per_step is None and checkpoint.pooling is None
    while is_open and not _has_room(found, config) and found.sizes.max_tokens_per_step // 2 >= LEAST_STEP_TOKENS:
        smaller = in_steps_of(replace(sizes, max_tokens_per_step=found.sizes.max_tokens_per_step // 2))
        if smaller.memory == found.memory:
            break
        found = replace(smaller, steps_reason=_smaller_steps(first, smaller))
    return found


def _smaller_steps(first: Choice, found: Choice) -> str:
    left_gb, tokens = first.memory.free_beside_weights_bytes / GB, first.sizes.max_tokens_per_step
    return f"steps of {found.sizes.max_tokens_per_step} tokens: those of {tokens} would leave KV {left_gb:.1f} GB"


def that_fits(choice: Choice, config: EngineConfig, here: Machine) -> Choice:
    """In fewer bits, where weights leave KV too little memory as they are: the first that leaves enough, or the
    smallest that there is."""
    factory, checkpoint = choice.factory, choice.checkpoint
    if not factory.smaller_weights or _has_room(choice, config):
        return choice
    wish, found = format_wish(config, checkpoint), choice
    for weights in factory.smaller_weights:
        if weights == STORED and not checkpoint.has_quantised_matrices:
            continue  # they are floats, as they are held now
        formats = factory.formats(checkpoint, replace(wish, weights=weights))
        if isinstance(formats, str):
            continue
        reasons = (_too_large(choice, config, weights), *formats.reasons)
        formats = replace(formats, reasons=reasons)
        found = _choice(config, checkpoint, here, factory, choice.backend_reason, formats)
        if _has_room(found, config):
            break
    return found


def _kv_wanted(choice: Choice, config: EngineConfig) -> int:
    """Bytes of KV that must be left beside weights."""
    if config.kv.memory_bytes is not None:
        return config.kv.memory_bytes
    longest = config.max_context or 0
    tokens = max(longest, min(LEAST_KV_TOKENS, choice.checkpoint.spec.max_context * 4))
    return sequence_bytes(choice.sizes, choice.kv_needs, tokens)


def _has_room(choice: Choice, config: EngineConfig) -> bool:
    memory = choice.memory
    return int(memory.free_beside_weights_bytes * memory.kv_share) >= _kv_wanted(choice, config)


def _too_large(choice: Choice, config: EngineConfig, weights: str) -> str:
    memory, held_gb = choice.memory, choice.shape.weight_bytes / GB
    sizes = f"{memory.total_bytes / GB:.0f} GB beside {_kv_wanted(choice, config) / GB:.1f} GB of KV"
    held = choice.formats.weights
    taken, keeps = ("as they are stored", held) if weights == STORED else (weights, "none")
    return f"{held_gb:.1f} GB in {held} do not fit {sizes}: {taken} (--quantise {keeps} keeps them)"


def kv_needs(factory: BackendFactory, checkpoint: Checkpoint, formats: Formats) -> tuple[KVGroupNeed, ...]:
    return tuple(
        KVGroupNeed(
            group.layers,
            group.window,
            factory.kv_bytes_per_token(checkpoint, group.layers, formats),
            group.content,
            group.values,
        )
        for group in checkpoint.spec.kv_groups()
    )


def _open(choice: str) -> str | None:
    return None if choice == "auto" else choice


def asked_weights(asked: str | None, checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """What float matrices are to be brought to, and the reason to tell. Weights that are stored quantised are never
    touched: quantising twice would add an error for nothing."""
    if asked is None:
        return None, None
    if not checkpoint.has_float_matrices and asked not in GPU_FLOATS:
        return STORED, f"--quantise {asked} changes nothing, the weights are stored quantised"
    return (STORED if asked == "none" else asked), f"quantise {asked} as asked for"


def preferred(offered: tuple[str, ...], checkpoint: Checkpoint, here: Machine) -> tuple[str | None, str | None]:
    """The best of what a backend would rather hold than floats, or the smallest where that does not fit."""
    if not offered or not checkpoint.has_float_matrices:
        return None, None
    best, smallest = offered[0], offered[-1]
    held_bytes = checkpoint.held_bytes(best)
    if held_bytes <= SHARE_OF_MEMORY * here.available_memory_bytes:
        sizes = f"{held_bytes / 1e6:.0f} MB to read for a token instead of {checkpoint.held_bytes() / 1e6:.0f}"
        return best, f"quantise {best} for {sizes} and 8-bit arithmetic (--quantise none keeps floats)"
    share = f"{SHARE_OF_MEMORY:.0%} of the free memory"
    why = f"since at {best} the weights would take more than {share} (--quantise {best} takes it)"
    return smallest, f"quantise {smallest} {why}"
