"""A model cut into ranks' parts: who gets which heads, columns and experts; that every kind of weight can be cut where
its blocks allow; and one sentence where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.random_weights import random_tensor
from tests.models.quantised.folders import FORMATS, make_quantised
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.backends.cpu.supported import unsupported_shape
from twostroke.backends.host.kept_weights import source_of
from twostroke.core.errors import ModelError
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import DrawnPart, random_tensors
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.shard import Shard, described, shard_checkpoint
from twostroke.models.spec import (
    DenseMlp,
    GatedDeltaNet,
    GroupedAttention,
    LayerSpec,
    Mamba2,
    ModelSpec,
    MoeSpec,
    NormPart,
    Recurrent,
    ShortConvolution,
    WideNorms,
)
from twostroke.models.weights.stored_forms import ScaledTensor
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind


def model(
    heads: int, kv_heads: int, mlp: DenseMlp | MoeSpec, head_dim: int = 16, kind: WeightKind = WeightKind.F32
) -> Checkpoint:
    attention = GroupedAttention(heads, kv_heads, head_dim, RopeSpec(1e4, head_dim), output_bias=True)
    spec = ModelSpec("test", 50, 64, 128, (LayerSpec(attention, mlp),) * 2, 1e-6, tied_embeddings=True)
    return Checkpoint("test", Path("nowhere"), spec, random_tensors(spec, kind))


def parts_of(checkpoint: Checkpoint, size: int, unit: int = 1) -> list[Checkpoint]:
    return [shard_checkpoint(checkpoint, Shard(rank, size), unit) for rank in range(size)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (8, 4, 2, "heads 4 + 4, KV heads 2 + 2"),
        (9, 3, 2, "heads 6 + 3, KV heads 2 + 1"),
        (5, 5, 4, "heads 2 + 1 + 1 + 1, KV heads 2 + 1 + 1 + 1"),
        (8, 2, 4, "heads 2 + 2 + 2 + 2, KV heads 1 + 1 + 1 + 1"),
        (8, 1, 3, "heads 3 + 3 + 2, KV heads 1 + 1 + 1"),
        (9, 3, 4, "heads 2 + 1 + 3 + 3, KV heads 1 + 1 + 1 + 1"),
    ],
)
def test_heads_go_with_their_kv_heads(heads: int, kv_heads: int, size: int, expected: str) -> None:
    checkpoint = model(heads, kv_heads, DenseMlp(96))
    parts = parts_of(checkpoint, size)
    assert described([part.spec for part in parts]).startswith(expected)
    q = [part.tensors["layers.1.q"].to_float32() for part in parts]
    o = [part.tensors["layers.1.o"].to_float32() for part in parts]
    np.testing.assert_array_equal(np.concatenate(q), checkpoint.tensors["layers.1.q"].to_float32())
    np.testing.assert_array_equal(np.concatenate(o, axis=1), checkpoint.tensors["layers.1.o"].to_float32())
    keys = checkpoint.tensors["layers.1.k"].to_float32().reshape(kv_heads, 16, 64)
    first_head, each = 0, heads // kv_heads
    for part in parts:  # each rank's first query finds the KV head that it had among all
        own = part.tensors["layers.1.k"].to_float32().reshape(-1, 16, 64)
        np.testing.assert_array_equal(own[0], keys[first_head // each])
        first_head += part.spec.layers[1].grouped.num_heads


@pytest.mark.parametrize("variant", variants())
def test_every_tensor_of_a_part_has_the_shape_that_it_declares(variant: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    for size in (2, 3, 4):
        for part in parts_of(checkpoint, size):
            assert {name: one.shape for name, one in part.tensors.items()} == part.spec.tensor_shapes()
            assert all(one.to_float32().shape == one.shape for one in part.tensors.values())


def test_what_is_added_once_is_rank_0s() -> None:
    first, second = parts_of(model(4, 2, DenseMlp(96)), 2)
    assert np.any(first.tensors["layers.0.o_bias"].to_float32())
    assert not np.any(second.tensors["layers.0.o_bias"].to_float32())


def test_experts_stay_whole_and_keep_their_numbers() -> None:
    checkpoint = model(4, 4, MoeSpec(6, 2, 32, shared=DenseMlp(64)))
    parts = parts_of(checkpoint, 4)
    assert described([part.spec for part in parts]).endswith("experts 2 + 2 + 1 + 1")
    assert [part.spec.moe.held_experts for part in parts if part.spec.moe] == [
        range(2),
        range(2, 4),
        range(4, 5),
        range(5, 6),
    ]
    for name in ("layers.0.experts.5.down", "layers.0.router"):
        np.testing.assert_array_equal(parts[3].tensors[name].to_float32(), checkpoint.tensors[name].to_float32())
    assert "layers.0.experts.5.down" not in parts[0].tensors
    assert parts[1].tensors["layers.0.shared.down"].shape == (64, 16)


def test_the_output_matrix_is_cut_though_the_embedding_is_not() -> None:
    checkpoint = model(4, 4, DenseMlp(96))
    parts = parts_of(checkpoint, 3)
    assert [part.spec.num_logits for part in parts] == [17, 17, 16]
    rows = np.concatenate([part.tensors["output"].to_float32() for part in parts])
    np.testing.assert_array_equal(rows, checkpoint.tensors["embedding"].to_float32())
    assert all(part.tensors["embedding"].shape == (50, 64) for part in parts)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_columns_of_every_kind(kind: WeightKind) -> None:
    tensor = random_tensor(kind, 5, 3 * 256)
    for start, stop in ((0, 256), (256, 768), (kind.block_values, 2 * kind.block_values)):
        np.testing.assert_array_equal(tensor.columns(start, stop).to_float32(), tensor.to_float32()[:, start:stop])


@pytest.mark.parametrize("form", FORMATS)
def test_columns_and_rows_of_every_stored_form(form: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_quantised(form, tmp_path)[0])
    scaled = {name: one for name, one in checkpoint.tensors.items() if isinstance(one, ScaledTensor)}
    for name in ("layers.0.down", "layers.1.o"):
        tensor = scaled[name]
        whole, unit = tensor.to_float32(), tensor.column_unit
        cut = unit * max(1, tensor.shape[1] // unit // 2)
        for start, stop in ((0, cut), (cut, tensor.shape[1])):
            part = tensor.columns(start, stop)
            assert part.kind is tensor.kind
            np.testing.assert_array_equal(part.to_float32(), whole[:, start:stop])
            np.testing.assert_array_equal(part.rows(3, 40).to_float32(), whole[3:40, start:stop])
            np.testing.assert_array_equal(tensor.rows(3, 40).columns(start, stop).to_float32(), whole[3:40, start:stop])


def test_random_weights_are_the_same_in_parts_and_drawn_when_they_are_read() -> None:
    checkpoint = model(8, 4, DenseMlp(256), kind=WeightKind.BF16)
    (part,) = [parts_of(checkpoint, 2)[1]]
    down = part.tensors["layers.0.down"]
    assert isinstance(down, DrawnPart) and down._drawn is None
    assert down.nbytes == 64 * 128 * 2 == down.data.nbytes
    np.testing.assert_array_equal(down.to_float32(), checkpoint.tensors["layers.0.down"].to_float32()[:, 128:])


def test_parts_are_kept_apart_from_each_other(tmp_path: Path) -> None:
    """Packed weights are known again by what their files are, and by the part that they are."""
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    sources = {source_of(one) for one in (checkpoint, *parts_of(checkpoint, 2), *parts_of(checkpoint, 4))}
    assert len(sources) == 7 and None not in sources


@pytest.mark.parametrize(
    ("checkpoint", "size", "unit", "sentence"),
    [
        (model(4, 2, DenseMlp(96)), 8, 1, "4 heads cannot be shared by 8 ranks: a KV head has 2 queries for 4 ranks"),
        (model(8, 8, DenseMlp(96)), 4, 32, "96 columns of an MLP, which stay together in runs of 32, cannot be shared"),
        (model(8, 8, MoeSpec(3, 2, 32)), 4, 1, "3 experts cannot be shared by 4 ranks"),
        (model(4, 4, DenseMlp(256), 16), 4, 32, "4 KV heads, which stay together in runs of 2, cannot be shared by 4"),
        (model(6, 2, DenseMlp(256), 16), 3, 32, "cannot be cut, since 32 of its columns stay together"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_a_sentence(
    checkpoint: Checkpoint, size: int, unit: int, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        parts_of(checkpoint, size, unit)


def test_blocks_of_the_file_bind_where_it_is_cut() -> None:
    """Four heads of 64 share a block of 256 numbers in the output projection: they stay together."""
    checkpoint = model(8, 8, DenseMlp(1024), head_dim=64)
    names = [name for name in checkpoint.tensors if name.endswith((".o", ".down"))]
    blocks = {name: random_tensor(WeightKind.Q4_K, *checkpoint.tensors[name].shape) for name in names}
    stored = replace(checkpoint, tensors={**checkpoint.tensors, **blocks})
    assert (
        described([part.spec for part in parts_of(stored, 2)]) == "heads 4 + 4, KV heads 4 + 4, MLP columns 512 + 512"
    )
    with pytest.raises(ModelError, match="8 KV heads, which stay together in runs of 4, cannot be shared by 4 ranks"):
        parts_of(stored, 4)


DELTA = GatedDeltaNet(4, 8, 16, 32, 4)
MAMBA = Mamba2(8, 16, 32, 2, 4, norm_groups=2)
CONVOLUTION = ShortConvolution(64, 3)


def state_model(mixer: Recurrent, kind: WeightKind = WeightKind.F32) -> Checkpoint:
    spec = ModelSpec("test", 50, 64, 128, (LayerSpec(mixer, None), LayerSpec(None, DenseMlp(256))), 1e-6)
    return Checkpoint("test", Path("nowhere"), spec, random_tensors(spec, kind))


@pytest.mark.parametrize(
    ("mixer", "size", "expected"),
    [
        (DELTA, 2, "heads of states 4 + 4, their key heads 2 + 2"),
        (DELTA, 3, "heads of states 4 + 2 + 2, their key heads 2 + 1 + 1"),
        (replace(DELTA, num_key_heads=2), 4, "heads of states 2 + 2 + 2 + 2, their key heads 1 + 1 + 1 + 1"),
        (replace(DELTA, num_key_heads=2), 3, "heads of states 2 + 2 + 4, their key heads 1 + 1 + 1"),
        (MAMBA, 2, "heads of states 4 + 4, their groups 1 + 1"),
        (MAMBA, 4, "heads of states 2 + 2 + 2 + 2, their groups 1 + 1 + 1 + 1"),
        (replace(MAMBA, num_groups=1, norm_groups=1), 3, "heads of states 3 + 3 + 2, their groups 1 + 1 + 1"),
        (CONVOLUTION, 3, "channels of convolutions 22 + 21 + 21"),
    ],
)
def test_heads_that_keep_states_go_with_those_that_serve_them(mixer: Recurrent, size: int, expected: str) -> None:
    """A layer of one block stays one."""
    checkpoint = state_model(mixer)
    parts = parts_of(checkpoint, size)
    assert described([part.spec for part in parts]).startswith(f"{expected}, MLP columns ")
    whole = checkpoint.tensors["layers.0.o"].to_float32()
    np.testing.assert_array_equal(
        np.concatenate([part.tensors["layers.0.o"].to_float32() for part in parts], axis=1), whole
    )
    for part in parts:
        assert part.spec.layers[0].mlp is None and part.spec.layers[1].attention is None
        assert {name: one.shape for name, one in part.tensors.items()} == part.spec.tensor_shapes()
        assert all(one.to_float32().shape == one.shape for one in part.tensors.values())


def test_a_convolutions_channels_go_with_their_heads() -> None:
    checkpoint = state_model(DELTA)
    conv = checkpoint.tensors["layers.0.conv"].to_float32()
    second = parts_of(checkpoint, 2)[1].tensors["layers.0.conv"].to_float32()
    rows = [*range(32, 64), *range(64 + 32, 128), *range(128 + 128, 128 + 256)]  # of queries, keys, values
    np.testing.assert_array_equal(second, conv[rows])


@pytest.mark.parametrize("kind", [WeightKind.F32, WeightKind.Q8_0])
@pytest.mark.parametrize(("size", "heads"), [(2, [2, 3, 6, 7]), (4, [3, 7])])
def test_value_heads_in_turns(kind: WeightKind, size: int, heads: list[int]) -> None:
    """As later GGUF files order them: each turn has one for each key head, and the last rank has the last of each."""
    checkpoint = state_model(replace(DELTA, tiled=True), kind)
    part = parts_of(checkpoint, size)[-1]
    rows = [row for head in heads for row in range(32 * head, 32 * head + 32)]
    for name, wanted in (("v", rows), ("z", rows), ("dt", heads), ("decay", heads)):
        whole = checkpoint.tensors[f"layers.0.{name}"].to_float32()
        np.testing.assert_array_equal(part.tensors[f"layers.0.{name}"].to_float32(), whole[wanted])
    whole = checkpoint.tensors["layers.0.o"].to_float32()
    np.testing.assert_array_equal(part.tensors["layers.0.o"].to_float32(), whole[:, rows])
    assert part.tensors["layers.0.o"].kind is kind


def test_who_sums_the_squares_of_what_is_normed_together(tmp_path: Path) -> None:
    """Keys that two ranks hold are counted once. Groups that lie on one rank each need no sum, on any rank."""
    checkpoint = load_checkpoint(make_tiny("olmo2", tmp_path)[0])
    norms = [part.spec.layers[0].grouped.wide_norms for part in parts_of(checkpoint, 4)]
    assert norms == [WideNorms(64, 32, counts_keys=counts) for counts in (True, False, True, False)]
    assert parts_of(checkpoint, 1)[0].spec.layers[0].grouped.wide_norms is None

    def parts_of_norm(mixer: Mamba2, size: int) -> list[NormPart | None]:
        own = [part.spec.layers[0].attention for part in parts_of(state_model(mixer), size)]
        return [one.norm_part for one in own if isinstance(one, Mamba2)]

    assert parts_of_norm(MAMBA, 2) == [None, None]
    assert parts_of_norm(MAMBA, 4) == [NormPart(group, 2, 64) for group in (0, 0, 1, 1)]
    assert parts_of_norm(MAMBA, 3) == [NormPart(0, 2, 64), NormPart(0, 2, 64), NormPart(1, 2, 64)]
    assert parts_of_norm(replace(MAMBA, norm_groups=1), 2) == [NormPart(0, 1, 128)] * 2


@pytest.mark.parametrize(
    ("mixer", "size", "unit", "sentence"),
    [
        (
            replace(DELTA, num_key_heads=2),
            9,
            1,
            "8 value heads cannot be shared by 9 ranks: a key head has 4",
        ),
        (DELTA, 3, 32, "4 key heads, which stay together in runs of 2, cannot be shared by 3 ranks"),
        (replace(DELTA, tiled=True), 4, 64, "4 key heads, which stay together in runs of 4, cannot be shared by 4"),
        (
            replace(DELTA, num_key_heads=3, num_value_heads=6, key_dim=64, tiled=True),
            2,
            64,
            "6 value heads, in turns of 3, cannot be shared by 2 ranks: 64 columns of the output projection stay",
        ),
        (MAMBA, 9, 1, "8 heads cannot be shared by 9 ranks: a group has 4 heads for 5 ranks"),
        (
            replace(MAMBA, num_heads=9, num_groups=3, norm_groups=2),
            3,
            1,
            "the width of states is normed in 2 groups, which 3 ranks cut otherwise than its heads",
        ),
        (CONVOLUTION, 3, 32, "64 channels of a convolution, which stay together in runs of 32, cannot be shared by 3"),
    ],
)
def test_states_that_cannot_be_shared_are_refused_in_a_sentence(
    mixer: Recurrent, size: int, unit: int, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        parts_of(state_model(mixer), size, unit)


def test_models_that_give_vectors_are_refused() -> None:
    checkpoint = model(4, 2, DenseMlp(96))
    vectors = replace(checkpoint, spec=replace(checkpoint.spec, has_output=False, tied_embeddings=False))
    with pytest.raises(ModelError, match="a model that gives vectors is not shared by ranks"):
        parts_of(vectors, 2)


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_known_models_can_be_shared_on_every_host(name: str) -> None:
    """By two and four ranks, with the widths that the CPU backend asks for: a layer of each kind."""
    spec = dimensions_from_config(KNOWN_SHAPES[name].config).spec
    if all(spec.kv_source(index) == index for index in range(spec.num_layers)):  # else they name one another
        spec = replace(spec, layers=tuple(dict.fromkeys(spec.layers)))
    checkpoint = Checkpoint(name, Path("nowhere"), spec, random_tensors(spec, WeightKind.Q8_0))
    for size in (2, 4):
        assert [unsupported_shape(part) for part in parts_of(checkpoint, size, 32)] == [None] * size
