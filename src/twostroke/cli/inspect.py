"""`twostroke inspect`: what a model is, and what of it fits in this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.cli import options, units
from twostroke.cli.inspect_record import record
from twostroke.config import EngineConfig
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve


def inspect(
    model: options.Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    config: EngineConfig = options.OWN,
) -> None:
    """Show a model's shape, parameters, quantisation, KV bytes a token, and what fits in this machine's memory.

    With an engine's options it says what such an engine would hold: --quantise q8_0 --kv-type int8, for instance.
    """
    found = record(load_checkpoint(resolve(model), name=model), config)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    console = Console()
    table = Table.grid(padding=(0, 2))
    for label, value in [*_shape_rows(found), *_weight_rows(found["weights"]), *_memory_rows(found)]:
        table.add_row(Text(label, style="dim"), Text(value))
    console.print(table, highlight=False)


def _shape_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    windows = "; ".join(f"{len(group['layers'])} layers {_kept(group)}" for group in found["layer_groups"])
    tied = " (tied embeddings)" if found["tied_embeddings"] else ""
    short = found["short_rope_context"]
    rope = "" if short is None else f"; up to {short:,} with the short rope factors, which is the default"
    mixers = found["mixers"]
    heads = "; ".join((f"{one['layers']} layers with " if len(mixers) > 1 else "") + _mixer(one) for one in mixers)
    if found["layers_that_share_kv"]:
        windows += f"; {found['layers_that_share_kv']} layers read the KV of others"
    return [
        ("model", found["model"]),
        ("file", found["file"]),
        ("family", found["family"]),
        ("parameters", f"{found['num_parameters'] / 1e6:,.1f}M{tied}"),
        ("layers", f"{found['num_layers']} of {found['hidden_size']} wide, {_mlp(found)}"),
        ("attention", f"{heads}; {windows}"),
        ("vocabulary", f"{found['vocab_size']:,}"),
        ("context", f"{found['max_context']:,} tokens{rope}"),
    ]


def _mixer(one: dict[str, Any]) -> str:
    """One kind of attention, or of what stands in its place."""
    match one["kind"]:
        case "grouped":
            return f"{one['num_heads']} query heads, {one['num_kv_heads']} KV heads of {one['head_dim']}"
        case "latent":
            kept = f"one latent of {one['latent']} and a key of {one['rotated']}"
            return f"{one['num_heads']} heads of {one['head_dim']} over {kept} a token"
        case "gated delta net":
            return f"a gated delta net of {one['num_heads']} heads, {one['key_dim']} x {one['value_dim']} each"
        case "mamba-2":
            return f"Mamba-2 of {one['num_heads']} heads, {one['head_dim']} x {one['state_size']} each"
        case "short convolution":
            return f"a convolution of {one['channels']} channels over {one['taps']} tokens"
    return "an MLP alone"


def _kept(group: dict[str, Any]) -> str:
    if group["content"] == "state":
        return "with a state"
    return "full" if group["window"] is None else f"windowed to {group['window']}"


def _mlp(found: dict[str, Any]) -> str:
    experts = found["experts"]
    if experts is None:
        return f"MLP {found['intermediate_size']}"
    return f"{experts['number']} experts of {experts['intermediate_size']}, {experts['a_token']} a token"


def _weight_rows(weights: dict[str, Any]) -> list[tuple[str, str]]:
    largest_first = sorted(weights["stored_as"].items(), key=lambda item: -item[1]["bytes"])
    parts = [f"{name} {kind['tensors']} tensors, {units.size(kind['bytes'])}" for name, kind in largest_first]
    return [
        ("weights", f"{units.size(weights['bytes'])}, {weights['bits_a_parameter']:.2f} bits a parameter"),
        ("stored as", "; ".join(parts)),
    ]


def _memory_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    here, context = found["here"], found["max_context"]
    per_token, full_bytes = here["kv_bytes_per_token"], here["kv_bytes_of_context"]
    states = f"{units.size(here['state_bytes'])} of states a sequence; " if here["state_bytes"] else ""
    is_larger = here["held_weight_bytes"] > 1.01 * found["weights"]["bytes"]
    return [
        ("backend", f"{here['backend']}: {here['reason']}"),
        ("formats", here["formats"]),
        *([("repacked", f"to {units.size(here['held_weight_bytes'])}")] if is_larger else []),
        ("KV", f"{units.size(per_token)} a token; {states}{units.size(full_bytes)} for {context:,} tokens"),
        (
            here["memory_of"],
            f"{here['threads']} threads, {units.size(here['memory_bytes'])} of memory, "
            f"{units.size(here['free_beside_weights_bytes'])} free beside the weights",
        ),
        ("fits", _fits(here, context)),
    ]


def _fits(here: dict[str, Any], context: int) -> str:
    """What an engine takes unless told otherwise: `--kv-memory` may give it all that is free."""
    if here["free_beside_weights_bytes"] == 0:
        return f"no: the weights alone take {units.size(here['held_weight_bytes'])}"
    tokens = here["kv_tokens"]
    if not tokens:
        return "the weights, and no KV worth the name beside them: give some with --kv-memory"
    text = f"the weights, and KV for {tokens:,} tokens by default (--kv-memory says otherwise): "
    sequences = tokens // context
    return text + (f"{sequences} sequences of {context:,}" if sequences else "less than one full context")
