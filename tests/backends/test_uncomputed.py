"""What a layer may be and no backend computes: each declines it with a sentence, whoever made the spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.backends import BACKENDS, cuda
from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.cpu.supported import LAYERS_UNLIKE
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.features import COMPUTED, LAYERS_DIFFER, Feature, uncomputed
from twostroke.models.random_weights import random_tensors
from twostroke.models.rope_spec import NO_ROPE, RopeSpec
from twostroke.models.spec import (
    Attention,
    ClampedGate,
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerInput,
    LayerSpec,
    Mlp,
    ModelSpec,
    MoeSpec,
    QueryGrowth,
    Routing,
    ShortConvolution,
    WideNorms,
)
from twostroke.models.weights.tensor import WeightKind

ATTENTION, MLP = GroupedAttention(4, 2, 16, RopeSpec(1e4, 16)), DenseMlp(96)
LATENT = LatentAttention(4, 32, 16, 16, 16, RopeSpec(1e4, 16))
LAYER = LayerSpec(ATTENTION, MLP)


def checkpoint_of(*layers: LayerSpec, **ends: float) -> Checkpoint:
    spec = ModelSpec("made_up", 32, 64, 128, layers, 1e-5, **ends)
    return Checkpoint("made up", Path("made_up"), spec, random_tensors(spec, WeightKind.F32))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (replace(LAYER, mlp=DenseMlp(96, has_bias=True)), "its MLPs have no biases"),
        (replace(LAYER, is_parallel=True), "a norm before each block"),
        (replace(LAYER, norm_bias=True), "a norm before each block"),
    ],
)
def test_every_backend_declines_what_none_computes(layer: LayerSpec, sentence: str) -> None:
    """In any layer: the first is a plain one."""
    checkpoint = checkpoint_of(LAYER, layer)
    for reason in (REFERENCE.supports(checkpoint), CPU.supports(checkpoint), cuda._unsupported_shape(checkpoint)):
        assert reason is not None and sentence in reason


NORMED = replace(ATTENTION, qk_norm=True)
OF_A_RANK = replace(NORMED, norm_spans_heads=True, wide_norms=WideNorms(128, 64, counts_keys=True))
BESIDE = MoeSpec(4, 2, 32, shared=MLP, has_own_norms=True)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (replace(LAYER, attention=replace(ATTENTION, value_norm=True)), "beside queries and keys alone"),
        (replace(LAYER, mlp=DenseMlp(96, squared_relu=True)), "pass SiLU, or GELU by tanh"),
        (replace(LAYER, attention=OF_A_RANK), "its norms are over numbers of one rank"),
    ],
)
def test_what_hosts_compute_is_declined_on_cards(layer: LayerSpec, sentence: str) -> None:
    checkpoint = checkpoint_of(layer, layer)
    assert REFERENCE.supports(checkpoint) is CPU.supports(checkpoint) is None
    assert sentence in str(cuda._unsupported_shape(checkpoint))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (replace(LAYER, attention=replace(NORMED, norms_rotated=True, norm_spans_heads=True)), "are of one head each"),
        (replace(LAYER, mlp=DenseMlp(96, is_exact=True)), "pass SiLU, or GELU by tanh"),
        (replace(LAYER, mlp=MoeSpec(4, 2, 32), sandwich_norms=True), "a norm before them and none behind"),
        (replace(LAYER, mlp=MoeSpec(4, 2, 32), input_norms=False), "a norm before them and none behind"),
        (replace(LAYER, mlp=replace(BESIDE, shared=None)), "norms of their own beside an MLP"),
        (replace(LAYER, has_scale=True), "layers that norm what they give"),
    ],
)
def test_what_a_card_has_no_kernel_for(layer: LayerSpec, sentence: str) -> None:
    assert sentence in str(cuda._unsupported_shape(checkpoint_of(layer, layer)))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (replace(LAYER, attention=replace(ATTENTION, keys_are_values=True)), "made of keys pass a norm"),
        (
            replace(LAYER, attention=replace(ATTENTION, qk_norm=True, norms_rotated=True, norm_spans_heads=True)),
            "are of one head each",
        ),
        (replace(LAYER, has_scale=True), "have a scale norm what their blocks give"),
        (replace(LAYER, mlp=MoeSpec(4, 2, 32, has_own_norms=True)), "stand beside an MLP"),
        (replace(LAYER, mlp=MoeSpec(4, 2, 32, shared=MLP, has_own_norms=True)), "stand beside an MLP"),
        (replace(LAYER, layer_input=LayerInput(32)), LAYERS_UNLIKE),  # of another activation than the MLP
        (replace(LAYER, layer_input=LayerInput(24, "silu")), "size of a layer's input is 24"),
    ],
)
def test_what_the_cpu_computes_as_gemma_has_it_alone(layer: LayerSpec, sentence: str) -> None:
    checkpoint = checkpoint_of(layer, layer)
    assert REFERENCE.supports(checkpoint) is None
    assert sentence in str(CPU.supports(checkpoint))


@pytest.mark.parametrize(
    ("attention", "sentence"),
    [
        (replace(LATENT, rank=1024), "a rank of a multiple of 8 up to 512, not 1024"),
        (replace(LATENT, rank=36), "a rank of a multiple of 8 up to 512, not 36"),
        (replace(LATENT, value_dim=264), "a value of a multiple of 8 up to 256, not 264"),
        (replace(ATTENTION, rope=RopeSpec(1e4, 16, pairs_neighbours=True)), "this model's are neighbours"),
    ],
)
def test_attention_that_a_card_has_no_kernel_for(attention: Attention, sentence: str) -> None:
    checkpoint = checkpoint_of(*[replace(LAYER, attention=attention)] * 2)
    assert sentence in str(cuda._unsupported_shape(checkpoint))
    mixed = checkpoint_of(LAYER, replace(LAYER, attention=LATENT))
    assert cuda._unsupported_shape(mixed) == LAYERS_DIFFER


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ((MoeSpec(4, 2, 32), MoeSpec(8, 2, 32)), "experts of several kinds"),
        ((MoeSpec(4, 2, 32), MoeSpec(4, 2, 32, shared=DenseMlp(96, clamp=ClampedGate()))), "experts of several kinds"),
        ((MoeSpec(4, 2, 32, shared=DenseMlp(96, clamp=ClampedGate())), MLP), "a plain gate without biases"),
        ((DenseMlp(96, clamp=ClampedGate()), MLP), "a plain gate without biases"),
        ((MoeSpec(4, 2, 32, activation="gelu_tanh"), MLP), "several activations"),
    ],
)
def test_mlps_that_a_card_has_no_room_or_kernel_for(layers: tuple[Mlp, ...], sentence: str) -> None:
    checkpoint = checkpoint_of(*(replace(LAYER, mlp=mlp) for mlp in layers))
    assert sentence in str(cuda._unsupported_shape(checkpoint))


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, attention=replace(ATTENTION, has_sinks=True)),
        replace(LAYER, attention=replace(ATTENTION, output_gate=True)),
        replace(LAYER, attention=replace(ATTENTION, rope=NO_ROPE)),
        replace(LAYER, attention=ShortConvolution(64, 3)),
        replace(LAYER, attention=replace(ATTENTION, growth=QueryGrowth(0.1, 64))),
        replace(LAYER, mlp=MoeSpec(4, 2, 32, shared=MLP)),
        replace(LAYER, mlp=MoeSpec(4, 2, 32, router_bias=True)),
        replace(LAYER, mlp=MoeSpec(4, 2, 32, routing=Routing("sigmoid"))),
        replace(LAYER, mlp=MoeSpec(4, 2, 32, has_bias=True)),
        replace(LAYER, mlp=MoeSpec(4, 2, 32, clamp=ClampedGate())),
        replace(LAYER, attention=replace(NORMED, norm_spans_heads=True)),
        replace(LAYER, attention=replace(NORMED, norms_rotated=True)),
        replace(LAYER, sandwich_norms=True, input_norms=False),
        replace(LAYER, attention=replace(NORMED, value_norm=True)),
        replace(LAYER, attention=replace(NORMED, value_norm=True, keys_are_values=True)),
        replace(LAYER, has_scale=True, sandwich_norms=True),
        replace(LAYER, layer_input=LayerInput(32, "silu")),
        replace(LAYER, attention=None),
        replace(LAYER, mlp=None),
        replace(LAYER, mlp=DenseMlp(96, is_gated=False)),
        replace(LAYER, mlp=MoeSpec(4, 2, 32, is_gated=False)),
        replace(LAYER, mlp=BESIDE, sandwich_norms=True),
    ],
)
def test_what_is_computed_by_all(layer: LayerSpec) -> None:
    has_all = isinstance(layer.attention, GroupedAttention) and layer.mlp is not None
    checkpoint = checkpoint_of(layer, layer if has_all else LAYER)
    assert REFERENCE.supports(checkpoint) is CPU.supports(checkpoint) is cuda._unsupported_shape(checkpoint) is None


def test_keys_and_values_of_another_layer_are_read_by_all() -> None:
    checkpoint = checkpoint_of(LAYER, replace(LAYER, attention=replace(ATTENTION, shares_kv_of=0)))
    assert REFERENCE.supports(checkpoint) is CPU.supports(checkpoint) is cuda._unsupported_shape(checkpoint) is None


def test_latents_are_read_by_all_where_all_layers_have_them() -> None:
    layer = replace(LAYER, attention=LATENT)
    alike, mixed = checkpoint_of(layer, layer), checkpoint_of(LAYER, layer)
    assert REFERENCE.supports(alike) is CPU.supports(alike) is cuda._unsupported_shape(alike) is None
    assert REFERENCE.supports(mixed) is None
    assert (CPU.supports(mixed), cuda._unsupported_shape(mixed)) == (LAYERS_UNLIKE, LAYERS_DIFFER)


def test_a_model_of_states_alone_is_declined_on_the_cpu() -> None:
    checkpoint = checkpoint_of(*[replace(LAYER, attention=ShortConvolution(64, 3))] * 2)
    assert REFERENCE.supports(checkpoint) is None
    assert "none of its layers attends" in str(CPU.supports(checkpoint))


@pytest.mark.parametrize("end", ["final_norm_bias", "head_bias"])
def test_biases_at_the_ends_are_declined(end: str) -> None:
    for backend in COMPUTED:
        assert "last norm and the output head" in str(uncomputed(checkpoint_of(LAYER, **{end: True}).spec, backend))


def test_every_backend_computes_a_part_of_a_model() -> None:
    part = checkpoint_of(replace(LAYER, mlp=MoeSpec(4, 2, 32, held=(0, 2))))
    rows = replace(checkpoint_of(LAYER).spec, head_rows=16)
    for spec in (part.spec, rows):
        assert {uncomputed(spec, backend) for backend in COMPUTED} == {None}


def test_every_backend_says_what_it_computes_and_all_compute_every_whole_model() -> None:
    assert set(COMPUTED) == set(BACKENDS)
    own = {name: set(Feature) - learnt for name, learnt in COMPUTED.items()}
    assert own == {"reference": set(), "cpu": set(), "cuda": {Feature.RANK_NORMS}}


def test_layers_of_several_sizes_run_where_each_is_read_by_itself() -> None:
    wider, windowed = replace(LAYER, mlp=DenseMlp(128)), replace(LAYER, attention=replace(ATTENTION, window=8))
    for other in (wider, replace(LAYER, attention=GroupedAttention(8, 4, 16, RopeSpec(1e4, 16)))):
        checkpoint = checkpoint_of(LAYER, other)
        assert REFERENCE.supports(checkpoint) is CPU.supports(checkpoint) is None
        assert cuda._unsupported_shape(checkpoint) is None
    # Of one KV group, which has blocks of one size.
    same_group = checkpoint_of(LAYER, replace(LAYER, attention=GroupedAttention(4, 1, 32, RopeSpec(1e4, 32))))
    assert REFERENCE.supports(same_group) is None
    assert CPU.supports(same_group) == LAYERS_UNLIKE
    assert cuda._unsupported_shape(same_group) == LAYERS_DIFFER
    alike = checkpoint_of(LAYER, windowed)
    assert REFERENCE.supports(alike) is CPU.supports(alike) is cuda._unsupported_shape(alike) is None
