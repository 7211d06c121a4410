"""What K and V are kept in on the device: 16 bits as they are, or one byte a number and a scale, which the checkpoint
gives for a head or each token has for itself. Knows names and bytes; no torch, as a plan asks here too."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cuda.supported import has_latents
from twostroke.core.formats import Formats, FormatWish
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import GroupedAttention, LatentAttention

ONE_BYTE = ("fp8", "int8")
"""Names of `Formats.kv` that take a byte a number; all others take two, but for float32, which tests alone have."""
ELEMENT_BYTES = {"f32": 4, "fp8": 1, "int8": 1}
TOKEN_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVCode:
    name: str  # of `Formats.kv`
    has_token_scales: bool  # else of one byte: scales of heads, from the checkpoint

    @property
    def is_one_byte(self) -> bool:
        return self.name in ONE_BYTE

    def token_bytes(self, attention: GroupedAttention | LatentAttention) -> int:
        """Of one token in one layer."""
        held = attention.kv_values * ELEMENT_BYTES.get(self.name, 2)
        if self.has_token_scales:
            assert isinstance(attention, GroupedAttention)
            held += 2 * attention.num_kv_heads * TOKEN_SCALE_BYTES
        return held


def kv_code(checkpoint: Checkpoint, formats: Formats) -> KVCode:
    return KVCode(formats.kv, formats.kv in ONE_BYTE and not has_scales_for(checkpoint, formats.kv))


def has_scales_for(checkpoint: Checkpoint, kind: str) -> bool:
    """Whether the checkpoint gives scales of every layer's keys and values for this kind. A file that has scales, and
    says nothing of what they are for, means fp8."""
    scales = checkpoint.kv_scales
    scheme = None if checkpoint.quantisation is None else checkpoint.quantisation.kv
    if scales is None or kind != ("fp8" if scheme is None else scheme.kind) or (scheme and scheme.is_dynamic):
        return False
    for layer, spec in enumerate(checkpoint.spec.layers):
        given = (scales.keys.get(layer), scales.values.get(layer))
        if not isinstance(own := spec.attention, GroupedAttention):
            return False
        if any(one is None or len(one) not in (1, own.num_kv_heads) for one in given):
            return False
    return True


def declines(checkpoint: Checkpoint, wish: FormatWish, *, lacks_float8: bool) -> str | None:
    """Why KV is not to be had in one byte, where that is asked for."""
    if has_latents(checkpoint.spec):
        return f"it keeps latents in 16 bits, not in {wish.kv}"
    if (other := next((one for one in (wish.weights, wish.arithmetic) if one == "f16"), None)) is None:
        other = wish.arithmetic if wish.arithmetic not in (None, "bf16", "fp8") else None
    if other is not None:
        return f"KV in {wish.kv} is multiplied in bf16: it does not go with {other}"
    if wish.kv == "fp8" and lacks_float8:
        return "this device has no float8: that takes compute capability 8.9 or newer; int8 goes with any"
    return None


def reason_of(checkpoint: Checkpoint, kind: str) -> str:
    """How scales come about, for a user to read."""
    if has_scales_for(checkpoint, kind):
        return f"KV in {kind} by the scales of the checkpoint"
    return f"KV in {kind} with a scale for each token and head"
