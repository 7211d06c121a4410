"""`twostroke inspect`: what a model is, and what of it fits in this machine."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke import backends, machine
from twostroke.cli import options, units
from twostroke.engine.build import kv_needs
from twostroke.engine.quantise import by_default
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve
from twostroke.models.spec import ModelSpec


def inspect(
    model: options.Model,
    backend: options.Backend = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show a model's shape, parameters, quantisation, KV bytes a token, and what fits in this machine's memory."""
    checkpoint = load_checkpoint(resolve(model), name=model)
    if as_json:
        from twostroke.cli.inspect_record import record

        print(json.dumps(record(checkpoint, backend), ensure_ascii=False))
        return
    console = Console()
    table = Table.grid(padding=(0, 2))
    for label, value in [*_shape_rows(checkpoint), *_weight_rows(checkpoint), *_memory_rows(checkpoint, backend)]:
        table.add_row(Text(label, style="dim"), Text(value))
    console.print(table, highlight=False)


def _shape_rows(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    spec = checkpoint.spec
    windows = "; ".join(
        f"{len(layers)} layers " + ("full" if window is None else f"windowed to {window}")
        for window, layers in spec.kv_windows()
    )
    return [
        ("model", checkpoint.name),
        ("file", str(checkpoint.path)),
        ("family", spec.family),
        (
            "parameters",
            f"{checkpoint.num_parameters / 1e6:,.1f}M" + (" (tied embeddings)" if spec.tied_embeddings else ""),
        ),
        ("layers", f"{spec.num_layers} of {spec.hidden_size} wide, {_mlp(spec)}"),
        ("attention", f"{spec.num_heads} query heads, {spec.num_kv_heads} KV heads of {spec.head_dim}; {windows}"),
        ("vocabulary", f"{spec.vocab_size:,}"),
        ("context", f"{spec.max_context:,} tokens"),
    ]


def _mlp(spec: ModelSpec) -> str:
    if spec.moe is None:
        return f"MLP {spec.intermediate_size}"
    moe = spec.moe
    return f"{moe.num_experts} experts of {moe.expert_intermediate_size}, {moe.experts_per_token} a token"


def _weight_rows(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        kinds[tensor.kind.name] += 1
        sizes[tensor.kind.name] += tensor.nbytes
    parts = [f"{name} {kinds[name]} tensors, {units.size(total)}" for name, total in sizes.most_common()]
    bits = 8 * checkpoint.weight_bytes / checkpoint.num_parameters
    return [
        ("weights", f"{units.size(checkpoint.weight_bytes)}, {bits:.2f} bits a parameter"),
        ("stored as", "; ".join(parts)),
    ]


def _memory_rows(checkpoint: Checkpoint, backend: str) -> list[tuple[str, str]]:
    factory, reason = backends.choose(backend, checkpoint)
    here = machine.detect()
    quantised = None
    if factory.quantises_on_load:
        checkpoint, quantised = by_default(checkpoint, here)
    needs = kv_needs(factory, checkpoint)
    per_token = sum(need.bytes_per_token for need in needs)
    memory = factory.memory(checkpoint, here)
    free = memory.free_beside_weights_bytes
    context = checkpoint.spec.max_context
    full_bytes = sum(
        min(context, need.window if need.window is not None else context) * need.bytes_per_token for need in needs
    )
    return [
        ("backend", f"{factory.name} ({reason})"),
        *([("on load", quantised)] if quantised is not None else []),
        ("KV", f"{units.size(per_token)} a token; {units.size(full_bytes)} for {context:,} tokens"),
        (
            memory.owner,
            f"{here.threads} threads, {units.size(memory.total_bytes)} of memory, "
            f"{units.size(free)} free beside the weights",
        ),
        ("fits", _fits(checkpoint, free, per_token, full_bytes)),
    ]


def _fits(checkpoint: Checkpoint, free: int, per_token: int, full_bytes: int) -> str:
    if free == 0:
        return f"no: the weights alone take {units.size(checkpoint.held_bytes)}"
    sequences = free // full_bytes
    if sequences == 0:
        return f"the weights, and about {free // per_token:,} tokens of KV: less than one full context"
    return (
        f"the weights, and {free // per_token:,} tokens of KV: {sequences} sequences of {checkpoint.spec.max_context:,}"
    )
