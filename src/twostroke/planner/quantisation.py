"""What weights and KV may be kept in, in bits, and the arithmetic that each is multiplied in."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class Quantisation:
    weight_bits: float
    """Scales counted in."""
    arithmetic: str
    """The kind of `Device.peak_flops`; a device without it multiplies in bf16."""
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


QUANTISATIONS = {
    "f32": Quantisation(32.0, "bf16", 32.0),
    "bf16": Quantisation(16.0, "bf16", 16.0),
    "fp8": Quantisation(8.0, "fp8", 16.0),
    "int8": Quantisation(8.0, "int8", 16.0),
    "int4": Quantisation(4.25, "bf16", 16.0),  # groups of 128 with a scale and a zero, as AWQ and GPTQ have them
    "nvfp4": Quantisation(4.5, "fp4", 16.0),
    "mxfp4": Quantisation(4.25, "bf16", 16.0, other_bits=16.0),  # experts alone, as gpt-oss has them
    "q8_0": Quantisation(8.5, "bf16", 8.5),
    "q4_1": Quantisation(5.0, "bf16", 8.5),
    "q4_0": Quantisation(4.5, "bf16", 8.5),
    "q5_0": Quantisation(5.5, "bf16", 8.5),
    "q5_1": Quantisation(6.0, "bf16", 8.5),
    "q6_k": Quantisation(6.5625, "bf16", 6.5625),  # K and IQ kinds: with the head in Q6_K, as llama.cpp writes it
    "q5_k": Quantisation(5.5, "bf16", 6.5625),
    "q4_k": Quantisation(4.5, "bf16", 6.5625),
    "q3_k": Quantisation(3.4375, "bf16", 6.5625),
    "q2_k": Quantisation(2.625, "bf16", 6.5625),
    "iq4_nl": Quantisation(4.5, "bf16", 6.5625),
    "iq4_xs": Quantisation(4.25, "bf16", 6.5625),
}
KV_BITS = {"f16": 16.0, "bf16": 16.0, "fp8": 8.0, "int8": 8.5}  # int8: with a scale a head and position


def find_quantisation(name: str) -> Quantisation:
    found = QUANTISATIONS.get(name.lower())
    if found is None:
        raise BadRequestError(f"there is no quantisation {name[:40]!r}; known are: {', '.join(QUANTISATIONS)}")
    return found


def find_kv_bits(name: str) -> float:
    bits = KV_BITS.get(name.lower())
    if bits is None:
        raise BadRequestError(f"there is no KV kind {name[:40]!r}; known are: {', '.join(KV_BITS)}")
    return bits
