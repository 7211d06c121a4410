"""What a layer may get for each token beside the residual stream, as a model declares it. Standard library alone;
others take these names from `models/spec.py`."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.models.mlp_spec import Activation, Shapes


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Gemma 4: beside the residual stream a layer gets a vector of its own for each token, looked up by the token and
    made from its embedding. A gate of the stream decides how much of it joins the stream, behind the MLP."""

    width: int
    activation: Activation = "gelu_tanh"

    def tensor_shapes(self, hidden: int) -> Shapes:
        matrices: Shapes = {"input_gate": (self.width, hidden), "input_projection": (hidden, self.width)}
        return matrices | {"post_input_norm": (hidden,)}

    def shared_shapes(self, vocab: int, hidden: int, num_layers: int) -> Shapes:
        """Of what makes all layers' vectors at once."""
        together = num_layers * self.width
        matrices: Shapes = {"layer_embedding": (vocab, together), "layer_projection": (together, hidden)}
        return matrices | {"layer_projection_norm": (self.width,)}
