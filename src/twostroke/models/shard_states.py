"""A rank's part of a layer that keeps a state: its heads, or its channels, and which runs of each tensor are theirs. A
convolution's channels go with the heads that read them. What is found after the output projection is summed over all
ranks, as behind attention."""

from __future__ import annotations

from dataclasses import replace

from twostroke.core.errors import ModelError
from twostroke.models.recurrent_spec import GatedDeltaNet, Mamba2, NormPart, Recurrent, ShortConvolution
from twostroke.models.shard_heads import HeadKind, HeadShare, Shard, share_heads, together
from twostroke.models.weights.runs import Cut, Runs, joined_runs

TensorCuts = dict[str, tuple[int, Runs]]
"""By a tensor's name within its layer: the axis that it is cut along, and what of it a rank has. Others are
everybody's."""


def part_of_states(own: Recurrent, shard: Shard, unit: int, output_unit: int) -> tuple[Recurrent, TensorCuts]:
    """`unit`: widths of a rank's matrices are multiples of it; inputs of the output projection are cut at multiples of
    `output_unit`. Raises ModelError, in one sentence, where the layer cannot be shared like that."""
    if isinstance(own, GatedDeltaNet):
        return _part_of_delta_net(own, shard, unit, output_unit)
    if isinstance(own, Mamba2):
        return _part_of_mamba(own, shard, unit, output_unit)
    return _part_of_convolution(own, shard, output_unit)


def _part_of_convolution(own: ShortConvolution, shard: Shard, output_unit: int) -> tuple[Recurrent, TensorCuts]:
    first, last = cut = shard.of(own.channels, output_unit, "channels of a convolution")
    cuts: TensorCuts = dict.fromkeys(("b", "c", "x", "conv"), (0, (cut,)))
    return replace(own, channels=last - first), cuts | {"o": (1, (cut,))}


def _part_of_delta_net(own: GatedDeltaNet, shard: Shard, unit: int, output_unit: int) -> tuple[Recurrent, TensorCuts]:
    kind = HeadKind(
        many="key heads",
        one="a key head",
        served="value heads",
        of_one="value heads",
        count=own.num_key_heads,
        each=own.values_per_key_head,
        width=own.value_dim,
        own_unit=together(unit, own.key_dim),
    )
    share = share_heads(shard, kind, output_unit)
    first, last = share.serving
    heads = _tiled_heads(own, share, shard, output_unit) if own.tiled else (share.served(kind.each),)
    keys, values = _scaled((share.serving,), own.key_dim), _scaled(heads, own.value_dim)
    convolved = (*keys, *_moved(keys, own.key_width), *_moved(values, 2 * own.key_width))
    cuts: TensorCuts = dict.fromkeys(("q", "k"), (0, keys)) | dict.fromkeys(("v", "z"), (0, values))
    cuts |= dict.fromkeys(("beta", "dt", "dt_bias", "decay"), (0, heads))
    cuts |= {"conv": (0, joined_runs(*convolved)), "o": (1, values)}
    return replace(own, num_key_heads=last - first, num_value_heads=_count(heads)), cuts


def _tiled_heads(own: GatedDeltaNet, share: HeadShare, shard: Shard, output_unit: int) -> Runs:
    """Value heads in turns of one for each key head: a rank has its own of each turn."""
    first, last = share.serving
    turns = range(*share.within)
    heads = joined_runs(*((turn * own.num_key_heads + first, turn * own.num_key_heads + last) for turn in turns))
    if len(heads) > 1 and any(place * own.value_dim % output_unit for run in heads for place in run):
        raise ModelError(
            f"{own.num_value_heads} value heads, in turns of {own.num_key_heads}, cannot be shared by {shard.size} "
            f"ranks: {output_unit} columns of the output projection stay together"
        )
    return heads


def _part_of_mamba(own: Mamba2, shard: Shard, unit: int, output_unit: int) -> tuple[Recurrent, TensorCuts]:
    share = _mamba_share(own, shard, unit, output_unit)
    heads, groups = share.served(own.num_heads // own.num_groups), share.serving
    (width,), (shared,) = _scaled((heads,), own.head_dim), _scaled((groups,), own.state_size)
    convolved = joined_runs(width, *_moved((shared,), own.width), *_moved((shared,), own.width + own.group_width))
    cuts: TensorCuts = dict.fromkeys(("z", "x", "gated_norm"), (0, (width,)))
    cuts |= dict.fromkeys(("b", "c"), (0, (shared,)))
    cuts |= dict.fromkeys(("dt", "dt_bias", "decay", "skip"), (0, (heads,)))
    cuts |= dict.fromkeys(("conv", "conv_bias"), (0, convolved)) | {"o": (1, (width,))}
    norm_groups, norm_part = _mamba_norm(own, shard, unit, output_unit)
    part = replace(
        own,
        num_heads=heads[1] - heads[0],
        num_groups=groups[1] - groups[0],
        norm_groups=norm_groups,
        norm_part=norm_part,
    )
    return part, cuts


def _mamba_share(own: Mamba2, shard: Shard, unit: int, output_unit: int) -> HeadShare:
    kind = HeadKind(
        many="groups of heads",
        one="a group",
        served="heads",
        of_one="heads",
        count=own.num_groups,
        each=own.num_heads // own.num_groups,
        width=own.head_dim,
        own_unit=together(unit, own.state_size),
    )
    return share_heads(shard, kind, output_unit)


def _mamba_norm(own: Mamba2, shard: Shard, unit: int, output_unit: int) -> tuple[int, NormPart | None]:
    """How many parts a rank's width is normed in. All ranks sum squares, or none does: so each looks at all."""
    normed = own.width // own.norm_groups

    def width_of(rank: int) -> Cut:
        share = _mamba_share(own, Shard(rank, shard.size), unit, output_unit)
        return _scaled((share.served(own.num_heads // own.num_groups),), own.head_dim)[0]

    first, last = width_of(shard.rank)
    widths = [width_of(rank) for rank in range(shard.size)]
    if not any(place % normed for width in widths for place in width):
        return (last - first) // normed, None
    if any(start // normed != (stop - 1) // normed for start, stop in widths):
        raise ModelError(
            f"the width of states is normed in {own.norm_groups} groups, which {shard.size} ranks cut otherwise than "
            "its heads"
        )
    return 1, NormPart(first // normed, own.norm_groups, normed)


def _scaled(runs: Runs, width: int) -> Runs:
    return tuple((first * width, last * width) for first, last in runs)


def _moved(runs: Runs, by: int) -> Runs:
    return tuple((first + by, last + by) for first, last in runs)


def _count(runs: Runs) -> int:
    return sum(last - first for first, last in runs)
