"""What weights and KV are kept in and what is multiplied in: as it was asked for, and as it was resolved. Names and
bits alone: which backend has which format is the backend's to say, and `models/weights` knows what blocks hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.core.errors import BadRequestError

STORED = "stored"
"""Of weights: each tensor as its file has it."""
PACKED = "packed"
"""Of copies for decode: twelve bits a weight."""
ARITHMETICS = ("f32", "f16", "bf16", "fp8", "int8", "fp4")
GPU_FLOATS = ("bf16", "f16")
"""What this engine computes in on a GPU, and keeps weights and KV in there."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What matrices may be brought to."""

    weight_bits: float
    """Scales counted in."""
    arithmetic: str
    """Of ARITHMETICS: what it is meant to be multiplied in. A device without it multiplies in bf16."""
    head_bits: float
    """Of the head and the embedding table."""
    other_bits: float | None = None
    """Where experts alone are quantised: of everything else. None: experts are like the rest."""

    @property
    def bits(self) -> dict[str, float | None]:
        """The arguments of `Dimensions.shape`."""
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
KV_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "fp8": 8.25, "int8": 8.25}  # of 8: with a scale a head and position


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
    """What was asked for; None: left open."""

    weights: str | None = None
    """What float matrices are brought to as they are loaded, or STORED."""
    arithmetic: str | None = None
    kv: str | None = None


ANY_FORMATS = FormatWish()


@dataclass(frozen=True, slots=True)
class Formats:
    """What one engine holds and computes in: resolved once, told in one line, and passed whole to the backend."""

    weights: str
    """What matrices are brought to as they are loaded, a name of WEIGHT_FORMATS; or STORED. What is left as it is, of a
    file whose tensors are already quantised, is the backend's to say."""
    arithmetic: str
    kv: str
    copies: str | None = None
    """Of weights, for steps of few tokens as decode has them; None: both phases read the same."""
    stored: str | None = None
    """What most of the file's weights are in; None: there is no file."""
    mixed: str | None = field(default=None, compare=False)
    """In words, which matrices stay as they are stored, and what the rest is brought to; None: all are alike."""
    inputs_in_float8: bool | None = None
    """Beside arithmetic in bf16. True: inputs of some matrices are rounded to float8; False: of none, since bf16 was
    asked for; None: as tables say."""
    reasons: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, weights: str, kv: str = "bf16") -> Formats:
        """As they are meant: what is planned of a device before anything is known of an engine on it."""
        find_kv_bits(kv)
        return cls(weights, find_weight_format(weights).arithmetic, kv)

    @property
    def line(self) -> str:
        """All that was chosen, and why, for a user to read."""
        weights = self.weights.upper()
        if self.stored is not None:
            stored = self.stored.upper()
            as_stored = self.weights == STORED or weights == stored
            weights = f"{stored} as stored" if as_stored else f"{weights} from {stored}"
        weights = self.mixed or weights
        copies = "no copies for decode" if self.copies is None else f"{self.copies} copies for decode"
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"weights {weights}, {self.arithmetic} arithmetic, KV {self.kv}, {copies}{why}"
