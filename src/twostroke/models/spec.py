"""ModelSpec: the few numbers a model declares about itself, read by every backend. Knows no file format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_context: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Phi-3: one factor a frequency, one list for contexts up to the original maximum and one beyond it. Which one is
    in force is decided once, by the context the engine is configured for (see `RopeSpec.inverse_frequencies`): keys in
    the cache are rotated already, so a sequence that outgrew the short factors would have to be read anew."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_context: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """One divisor a frequency, as a GGUF file stores Llama 3's scaling: already worked out."""

    divisors: tuple[float, ...]


RopeScaling = Llama3Scaling | LinearScaling | LongRopeScaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` of a head's dimensions, pairing `i` with `i + dim / 2`."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None

    def inverse_frequencies(self, max_context: int) -> npt.NDArray[np.float64]:
        """[dim / 2] radians a position."""
        base = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        scaling = self.scaling
        if scaling is None:
            return base
        if isinstance(scaling, LinearScaling):
            return base / scaling.factor
        if isinstance(scaling, FrequencyDivisors):
            return base / np.asarray(scaling.divisors, dtype=np.float64)
        if isinstance(scaling, LongRopeScaling):
            beyond = max_context > scaling.original_max_context
            return base / np.asarray(scaling.long_factors if beyond else scaling.short_factors, dtype=np.float64)
        return _llama3_frequencies(base, scaling)

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, LongRopeScaling) else 1.0


def _llama3_frequencies(base: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    low_wavelength = scaling.original_max_context / scaling.low_frequency_factor
    high_wavelength = scaling.original_max_context / scaling.high_frequency_factor
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (scaling.original_max_context / wavelength - scaling.low_frequency_factor) / span
    blended = (1 - smooth) * base / scaling.factor + smooth * base
    stretched = np.where(wavelength > low_wavelength, base / scaling.factor, blended)
    return np.where(wavelength < high_wavelength, base, stretched)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Where one layer may differ from its neighbours."""

    rope: RopeSpec
    window: int | None = None
    """Sliding window: a query at q reads keys above `q - window`."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of each layer's MLP: a router's softmax over all experts, of which a token is sent
    to the likeliest few; their outputs are summed, weighted by the router's shares."""

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    normalise_weights: bool = True
    """Whether the chosen experts' shares are scaled to a sum of 1."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of a layer's MLP. A model with `moe` has none: its experts' size is there."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float = 0.0
    """What scores are multiplied by; 0 stands for 1 / sqrt(head_dim)."""
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on attention's output projection."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before rope."""
    sandwich_norms: bool = False
    """Gemma: each block's output is normed too, before it joins the residual."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    moe: MoeSpec | None = None
    """Experts in every layer; None: a plain MLP in every layer."""

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def short_rope_context(self) -> int | None:
        """The longest context that is read with short rope factors, where a longer one takes others; None: all contexts
        are read alike."""
        scalings = [layer.rope.scaling for layer in self.layers]
        originals = [scaling.original_max_context for scaling in scalings if isinstance(scaling, LongRopeScaling)]
        return min(originals) if originals and min(originals) < self.max_context else None

    def kv_windows(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """The layers grouped by window, full attention first: the KV groups of this model."""
        windows = sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w or 0))
        return tuple((w, tuple(i for i, layer in enumerate(self.layers) if layer.window == w)) for w in windows)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model has, by canonical name, rows (outputs) first: what a loader must provide."""
        hidden, query_dim, kv_dim = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attention_norm": (hidden,),
            "q": (query_dim, hidden),
            "k": (kv_dim, hidden),
            "v": (kv_dim, hidden),
            "o": (hidden, query_dim),
            "mlp_norm": (hidden,),
        }
        if self.moe is None:
            layer |= _gated_mlp("", hidden, self.intermediate_size)
        else:
            layer["router"] = (self.moe.num_experts, hidden)
            for expert in range(self.moe.num_experts):
                layer |= _gated_mlp(expert_name(expert, ""), hidden, self.moe.expert_intermediate_size)
        if self.qkv_bias:
            layer |= {"q_bias": (query_dim,), "k_bias": (kv_dim,), "v_bias": (kv_dim,)}
        if self.output_bias:
            layer["o_bias"] = (hidden,)
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.sandwich_norms:
            layer |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, hidden), "final_norm": (hidden,)}
        if not self.tied_embeddings:
            shapes["output"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            shapes.update({layer_name(index, name): shape for name, shape in layer.items()})
        return shapes


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate": (intermediate, hidden),
        f"{prefix}up": (intermediate, hidden),
        f"{prefix}down": (hidden, intermediate),
    }


def layer_name(index: int, name: str) -> str:
    return f"layers.{index}.{name}"


def expert_name(expert: int, name: str) -> str:
    """Within a layer."""
    return f"experts.{expert}.{name}"
