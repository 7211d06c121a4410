"""Whether a backend holds a second copy of weights for decode, and why. Decode is bound by reading weights, and a copy
in fewer bits is less to read; but KV lives in the same memory, and decode pays in company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from twostroke.config import EngineConfig, ResolvedConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import PACKED, Formats
from twostroke.core.kv_layout import KVGroupNeed
from twostroke.core.kv_room import sequence_bytes
from twostroke.core.units import size
from twostroke.cost.model_shape import DecodeWeights
from twostroke.machine import MemorySpace

LEAST_STREAM_TOKENS = 512
"""KV for this many tokens of every stream that may run must be left."""
LEAST_FULL_SEQUENCES = 2
"""KV for this many sequences of the longest context must be left, too."""


@dataclass(frozen=True, slots=True)
class Holding:
    copies: DecodeWeights | None
    """None: decode reads the weights themselves."""
    resolved: ResolvedConfig
    reason: str | None

    def in_formats(self, formats: Formats) -> Formats:
        """All that is held, with the copies."""
        reasons = formats.reasons if self.reason is None else (*formats.reasons, self.reason)
        return replace(formats, copies=PACKED if self.copies is not None else None, reasons=reasons)


def choose_decode_weights(
    config: EngineConfig,
    offered: DecodeWeights | str | None,
    memory: MemorySpace,
    needs: tuple[KVGroupNeed, ...],
    resolve_within: Callable[[MemorySpace], ResolvedConfig],
) -> Holding:
    """`offered`: what the backend could hold, or why it cannot; None: it knows of no such copies. `resolve_within`: the
    config, resolved for a memory."""
    asked = config.decode_weights
    if not isinstance(offered, DecodeWeights):
        if asked == "packed":
            why = offered or "this backend reads the same weights in both phases"
            raise BackendError(f"decode weights cannot be packed here: {why}")
        return Holding(None, resolve_within(memory), offered and f"decode weights plain ({offered})")
    if asked == "plain":
        return Holding(None, resolve_within(memory), "decode weights plain (asked for)")
    left = max(0, memory.free_beside_weights_bytes - offered.num_bytes)
    beside = replace(memory, free_beside_weights_bytes=left)
    if asked == "packed":
        return Holding(offered, *_packed_as_asked(offered, memory, beside, resolve_within))
    plain = resolve_within(memory)
    missing = _missing(config, plain, needs, beside)
    if missing is not None:
        return Holding(None, plain, f"decode weights plain ({_gigabytes(offered)} more, packed, would leave {missing})")
    resolved = resolve_within(beside)
    return Holding(offered, resolved, _packed_reason(offered, resolved, "decode has less to read"))


def _packed_as_asked(
    offered: DecodeWeights,
    memory: MemorySpace,
    beside: MemorySpace,
    resolve_within: Callable[[MemorySpace], ResolvedConfig],
) -> tuple[ResolvedConfig, str]:
    try:
        resolved = resolve_within(beside)
    except BadRequestError as error:
        plain = resolve_within(memory)  # raises what is wrong with that, if packing is not to blame
        raise BadRequestError(
            f"with {_gigabytes(offered)} of packed weights for decode beside the others, {error}; --decode-weights "
            f"plain leaves KV for {plain.kv_tokens} tokens, of a context up to {plain.max_context}"
        ) from None
    return resolved, _packed_reason(offered, resolved, "asked for")


def _packed_reason(offered: DecodeWeights, resolved: ResolvedConfig, why: str) -> str:
    return (
        f"decode weights packed ({why}, in 12 bits a weight; {_gigabytes(offered)} more held, KV for "
        f"{resolved.kv_tokens} tokens left)"
    )


def _missing(
    config: EngineConfig, plain: ResolvedConfig, needs: tuple[KVGroupNeed, ...], beside: MemorySpace
) -> str | None:
    """What would not fit beside the copies, or None."""
    if config.kv.memory_bytes is not None:
        if config.kv.memory_bytes <= int(beside.free_beside_weights_bytes * beside.kv_share):
            return None
        return f"less than the {size(config.kv.memory_bytes)} of KV that were asked for"
    budget, sizes, context = int(beside.free_beside_weights_bytes * beside.kv_share), plain.sizes, plain.max_context
    for count, tokens in (
        (sizes.max_running, min(LEAST_STREAM_TOKENS, context)),
        (min(LEAST_FULL_SEQUENCES, sizes.max_running), context),
    ):
        if count * sequence_bytes(sizes, needs, tokens) > budget:
            return f"KV for less than {count} streams of {tokens} tokens"
    return None


def _gigabytes(offered: DecodeWeights) -> str:
    return f"{offered.num_bytes / 1e9:.1f} GB"
