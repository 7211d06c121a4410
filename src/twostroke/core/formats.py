"""The formats that weights and KV are kept in, and that products are computed in: as they were asked for, and as they
were resolved. Holds names and bits alone. Each backend says which formats it has, and `models/weights` knows what a
block holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.core.errors import BadRequestError

STORED = "stored"
"""The weights' format where each tensor stays as its file has it."""
PACKED = "packed"
"""The format of copies for decode that take twelve bits a weight."""
ARITHMETICS = ("f32", "f16", "bf16", "fp8", "int8", "fp4")
GPU_FLOATS = ("bf16", "f16")
"""The floats that this engine computes in on a GPU. It keeps weights and KV in them there, too."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format that matrices may be brought to."""

    weight_bits: float
    """Bits of one weight, its share of the scales included."""
    arithmetic: str
    """The kind of arithmetic, one of ARITHMETICS, that it is meant to be multiplied in. A device that lacks it
    multiplies in bf16."""
    head_bits: float
    """Bits of one weight in the head and the embedding table."""
    other_bits: float | None = None
    """Bits of one weight outside the experts, in a format that quantises experts alone. None means that experts are
    like the rest."""

    @property
    def bits(self) -> dict[str, float | None]:
        """The bits, as arguments of `Dimensions.shape`."""
        if self.other_bits is None:
            return {"weight_bits": self.weight_bits, "head_bits": self.head_bits, "expert_bits": None}
        return {"weight_bits": self.other_bits, "head_bits": self.head_bits, "expert_bits": self.weight_bits}


WEIGHT_FORMATS = {
    "f32": WeightFormat(32.0, "bf16", 32.0),
    "f16": WeightFormat(16.0, "bf16", 16.0),
    "bf16": WeightFormat(16.0, "bf16", 16.0),
    "fp8": WeightFormat(8.0, "fp8", 16.0),
    "int8": WeightFormat(8.0, "int8", 16.0),
    "int4": WeightFormat(4.25, "bf16", 16.0),  # groups of 128 with a scale and a zero, as AWQ and GPTQ have them
    "nvfp4": WeightFormat(4.5, "fp4", 16.0),
    "mxfp4": WeightFormat(4.25, "bf16", 16.0, other_bits=16.0),  # experts alone, as gpt-oss has them
    "q8_0": WeightFormat(8.5, "bf16", 8.5),
    "q4_1": WeightFormat(5.0, "bf16", 8.5),
    "q4_0": WeightFormat(4.5, "bf16", 8.5),
    "q5_0": WeightFormat(5.5, "bf16", 8.5),
    "q5_1": WeightFormat(6.0, "bf16", 8.5),
    "q6_k": WeightFormat(6.5625, "bf16", 6.5625),  # K and IQ kinds: with the head in Q6_K, as llama.cpp writes it
    "q5_k": WeightFormat(5.5, "bf16", 6.5625),
    "q4_k": WeightFormat(4.5, "bf16", 6.5625),
    "q3_k": WeightFormat(3.4375, "bf16", 6.5625),
    "q2_k": WeightFormat(2.625, "bf16", 6.5625),
    "iq4_nl": WeightFormat(4.5, "bf16", 6.5625),
    "iq4_xs": WeightFormat(4.25, "bf16", 6.5625),
}
# Kinds of 8 bits have a scale for each head and position, too.
KV_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "fp8": 8.25, "int8": 8.25}


def find_weight_format(name: str) -> WeightFormat:
    found = WEIGHT_FORMATS.get(name.lower())
    if found is None:
        raise BadRequestError(f"there is no quantisation {name[:40]!r}; known are: {', '.join(WEIGHT_FORMATS)}")
    return found


def find_kv_bits(name: str) -> float:
    bits = KV_BITS.get(name.lower())
    if bits is None:
        raise BadRequestError(f"there is no KV kind {name[:40]!r}; known are: {', '.join(KV_BITS)}")
    return bits


@dataclass(frozen=True, slots=True)
class FormatWish:
    """The formats that were asked for. None means that a choice was left open."""

    weights: str | None = None
    """The format that float matrices are brought to as they are loaded, or STORED."""
    arithmetic: str | None = None
    kv: str | None = None


ANY_FORMATS = FormatWish()


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats that one engine holds weights and KV in, and computes in. They are resolved once, told in one line,
    and passed whole to the backend."""

    weights: str
    """The format that matrices are brought to as they are loaded: a name of WEIGHT_FORMATS, or STORED. If a file's
    tensors are already quantised, the backend decides which of them stay as they are."""
    arithmetic: str
    kv: str
    copies: str | None = None
    """The format of a second copy of the weights, for steps of few tokens, as decode has them. None means that both
    phases read the same weights."""
    stored: str | None = None
    """The format of most of the file's weights. None means that there is no file."""
    mixed: str | None = field(default=None, compare=False)
    """Words for a user: which matrices stay as they are stored, and what the rest is brought to. None means that all
    are alike."""
    inputs_in_float8: bool | None = None
    """Whether inputs of some matrices are rounded to float8, beside arithmetic in bf16. False means that none are,
    since bf16 was asked for. None means that measured tables decide."""
    reasons: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, weights: str, kv: str = "bf16") -> Formats:
        """Returns the formats that these weights are meant to be computed in. A plan for a device takes them as long as
        nothing is known of an engine on it."""
        find_kv_bits(kv)
        return cls(weights, find_weight_format(weights).arithmetic, kv)

    @property
    def line(self) -> str:
        """One line for a user that says all that was chosen, and why."""
        weights = self.weights.upper()
        if self.stored is not None:
            stored = self.stored.upper()
            as_stored = self.weights == STORED or weights == stored
            weights = f"{stored} as stored" if as_stored else f"{weights} from {stored}"
        weights = self.mixed or weights
        copies = "no copies for decode" if self.copies is None else f"{self.copies} copies for decode"
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"weights {weights}, {self.arithmetic} arithmetic, KV {self.kv}, {copies}{why}"
