"""Cohere 2: attention and MLP side by side behind one LayerNorm without a bias. Three in four layers slide; the others
know no positions."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.exaone4 import without_positions
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec

_PERIOD = 4


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"use_qk_norm": (False,), "use_parallel_block": (True,)})
    config = config.over({"layer_norm_eps": 1e-5, "sliding_window": 4096})
    config = replace(config, names={"rms_norm_eps": "layer_norm_eps"})
    spec = decoder.spec_from_config(config, "cohere2", tied=True)
    period = config.integer("sliding_window_pattern", 1, decoder.MAX_LAYERS, _PERIOD)
    sliding = decoder.sliding_layers(config, spec.num_layers, decoder.every_nth_full(spec.num_layers, period))
    spec = without_positions(decoder.windowed(spec, config, sliding), sliding)
    layers = tuple(replace(layer, is_parallel=True) for layer in spec.layers)
    return replace(spec, layers=layers, final_norm_scale=config.number("logit_scale", 1e-6, 1e6, 0.0625))


_NOT_RUN = "no backend here computes LayerNorms in a decoder, and blocks side by side"
FAMILY = Family("cohere2", ("Cohere2ForCausalLM",), ("cohere2",), _from_config, not_run=_NOT_RUN)
