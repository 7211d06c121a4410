"""What each token goes through alone, as a model declares it: an MLP, or a mixture of experts and its routing. Knows no
file format and no arithmetic. Standard library alone; others take these names from `models/spec.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Alone = Literal["squared_relu", "gelu", "silu", "gelu_tanh"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss: of a gate g and an up u, both held within `limit` (g from above alone), `g * sigmoid(alpha * g) *
    (u + 1)`."""

    limit: float = 7.0
    alpha: float = 1.702


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One MLP that every token meets."""

    intermediate_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    clamp: ClampedGate | None = None
    """In place of the activation."""
    squared_relu: bool = False
    """Nemotron-H: in place of the activation, the square of what is above zero."""
    is_exact: bool = False
    """BERT: its GELU is by the error function, not by tanh."""

    @property
    def alone(self) -> Alone | None:
        """What is made of its first product, where it has no gate."""
        if self.is_gated:
            return None
        if self.squared_relu:
            return "squared_relu"
        return "gelu" if self.is_exact else self.activation

    def tensor_shapes(self, hidden: int, prefix: str = "") -> Shapes:
        size = self.intermediate_size
        inner: Shapes = {"gate": (size, hidden)} if self.is_gated else {}
        inner |= {"up": (size, hidden), "down": (hidden, size)}
        if self.has_bias:
            inner |= {f"{name}_bias": shape[:1] for name, shape in inner.items()}
        return {f"{prefix}{name}": shape for name, shape in inner.items()}


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's numbers become a choice of experts, beyond a softmax and its likeliest few."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_correction: bool = False
    """DeepSeek V3: a number an expert that is added to its score where experts are chosen, and is no part of its
    share."""
    num_groups: int = 1
    """Experts lie in groups of as many each, and a token is sent to those of its `groups_per_token` best alone."""
    groups_per_token: int = 1
    ranked_by: int = 1
    """A group is as good as this many of its best experts together."""
    share_scale: float = 1.0
    """What shares are multiplied by at last."""


PLAIN_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of a layer's MLP: a router's score of all experts, of which a token is sent to the
    best few; their outputs are summed, weighted by the router's shares."""

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    normalise_weights: bool = True
    """Whether the chosen experts' shares are scaled to a sum of 1."""
    activation: Activation = "silu"
    has_bias: bool = False
    """Of the experts' matrices."""
    router_bias: bool = False
    shared: DenseMlp | None = None
    """An MLP beside the experts, that every token meets."""
    shared_gate: bool = False
    """A router of its own for it: one number, whose sigmoid is its share."""
    routing: Routing = PLAIN_ROUTING
    clamp: ClampedGate | None = None
    """Of the experts, in place of the activation."""
    has_own_norms: bool = False
    """Gemma 4: router and experts read the residual stream through norms of their own, beside the MLP that every token
    meets. The outputs of both are normed before they are summed, and an expert's share has a factor of its own."""
    is_gated: bool = True
    """Whether the experts have gates."""
    squared_relu: bool = False
    """Of the experts, in place of the activation."""
    latent_size: int | None = None
    """Nemotron 3 Super: experts read and give this many numbers. One matrix brings a token's there, another what its
    experts gave back. Router and `shared` read the token's own."""
    held: tuple[int, int] | None = None
    """Of a rank that holds some of the experts (`models/shard.py`): the first, and the one behind the last; None: it
    holds all."""

    @property
    def held_experts(self) -> range:
        """Their numbers among all, which are those of their tensors."""
        return range(self.num_experts) if self.held is None else range(*self.held)

    @property
    def expert(self) -> DenseMlp:
        """One of them."""
        return DenseMlp(
            self.expert_intermediate_size,
            self.activation,
            is_gated=self.is_gated,
            has_bias=self.has_bias,
            clamp=self.clamp,
            squared_relu=self.squared_relu,
        )

    def expert_hidden(self, hidden: int) -> int:
        """How many numbers an expert reads and gives."""
        return hidden if self.latent_size is None else self.latent_size

    def router_shapes(self, hidden: int) -> Shapes:
        """All that a token meets whichever experts it is sent to."""
        shapes: Shapes = {"router": (self.num_experts, hidden)}
        if self.router_bias:
            shapes["router_bias"] = (self.num_experts,)
        if self.routing.has_correction:
            shapes["router_correction"] = (self.num_experts,)
        if self.shared is not None:
            shapes |= self.shared.tensor_shapes(hidden, "shared.")
        if self.shared_gate:
            shapes["shared.router"] = (1, hidden)
        if self.latent_size is not None:
            shapes |= {"latent_down": (self.latent_size, hidden), "latent_up": (hidden, self.latent_size)}
        if self.has_own_norms:
            names = ("router_norm", "experts_norm", "post_experts_norm", "post_shared_norm")
            shapes |= dict.fromkeys(names, (hidden,)) | {"expert_scale": (self.num_experts,)}
        return shapes

    def tensor_shapes(self, hidden: int) -> Shapes:
        shapes = self.router_shapes(hidden)
        for expert in self.held_experts:
            shapes |= self.expert.tensor_shapes(self.expert_hidden(hidden), expert_name(expert, ""))
        return shapes


Mlp = DenseMlp | MoeSpec


def expert_name(expert: int, name: str) -> str:
    """Within a layer."""
    return f"experts.{expert}.{name}"
