"""Kernels of layers that keep states: the delta rule's step and Mamba-2's at several tiles and numbers of streams, held
against float64 and against what memory takes for the states; the steps of drafts; and prompts by tiles. Nothing is
kept. States lie in more memory than L2 holds, and every launch of a captured graph has others.

    PYTHONPATH=src python -m bench.cuda.states [--only TEXT]"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from bench.cuda.clock import median_us, say
from twostroke.backends.cuda.compile_ahead import compiled_ahead, is_rehearsal
from twostroke.backends.cuda.kernels import delta_decode, mamba_decode
from twostroke.backends.cuda.kernels.convolution import convolve_tiles, keep_inputs
from twostroke.backends.cuda.kernels.delta_decode import DeltaVectors, StepTile, delta_step
from twostroke.backends.cuda.kernels.delta_prefill import meet_in_tiles, walk_over_tiles
from twostroke.backends.cuda.kernels.mamba_decode import MambaVectors, scan_step
from twostroke.backends.cuda.kernels.mamba_prefill import scan_tiles
from twostroke.backends.cuda.kernels.state_items import ITEM_WORDS, NO_TILE, TILE
from twostroke.backends.cuda.kernels.state_math import DeltaShape, MambaShape
from twostroke.backends.cuda.state_shape import StateShape, first_width, mixed_width
from twostroke.models.spec import GatedDeltaNet, Mamba2

MEMORY_RATE = 4.27e12
STREAMS = (1, 8, 64, 256)
DRAFTED_STREAMS, DRAFTED_TOKENS = (1, 64), 4
PROMPTS = (512, 4096)
SLOTS, MOST_LAUNCHES = 512, 48
CHECKED = 4
EPS = 1e-6
MIXERS: dict[str, GatedDeltaNet | Mamba2] = {
    "Qwen3.5-9B, Qwen3-Next": GatedDeltaNet(16, 32, 128, 128, 4),
    "Granite 4 H Small": Mamba2(128, 64, 128, 1, 4),
    "Nemotron-H-8B": Mamba2(128, 64, 128, 8, 4),
}
TILES = {
    GatedDeltaNet: [StepTile(*each, 4) for each in ((32, 2), (32, 1), (32, 4), (16, 2), (16, 4), (16, 8), (64, 1))],
    Mamba2: [StepTile(*each, 4) for each in ((16, 2), (16, 1), (16, 4), (8, 4), (8, 8), (32, 1), (32, 2))],
}


@dataclass
class Layer:
    """One layer's random weights, and slots with random states in them."""

    mixer: GatedDeltaNet | Mamba2
    slots: int = SLOTS
    device: str = "cuda"

    def __post_init__(self) -> None:
        mixer, self.state = self.mixer, StateShape.of(self.mixer)
        self.heads = mixer.num_value_heads if isinstance(mixer, GatedDeltaNet) else mixer.num_heads
        conv, dt_bias = self.drawn(mixer.conv_width, mixer.taps) / 2, self.drawn(self.heads)
        decay = -torch.exp(self.drawn(self.heads) / 4 - 2)
        self.states = self.drawn(self.slots, self.state.values)
        if isinstance(mixer, GatedDeltaNet):
            sizes = (mixer.num_key_heads, mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
            self.shape: DeltaShape | MambaShape = DeltaShape(*sizes, tiled=mixer.tiled)
            self.vectors: DeltaVectors | MambaVectors = DeltaVectors(
                conv, dt_bias, decay, 1 + self.drawn(mixer.value_dim) / 8
            )
        else:
            sizes = (mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.num_groups)
            self.shape = MambaShape(*sizes, mixer.shortest_step, mixer.longest_step)
            self.vectors = MambaVectors(conv, self.drawn(mixer.conv_width), dt_bias, decay, self.drawn(self.heads))

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device)

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What they are projected to, and where they are answered."""
        x = self.drawn(number, first_width(self.mixer)).bfloat16()
        return x, torch.zeros(number, mixed_width(self.mixer), dtype=torch.bfloat16, device=self.device)

    def items(self, first_slot: int, streams: int, tokens: int = 1, position: int = 9) -> torch.Tensor:
        found = torch.zeros(streams, ITEM_WORDS, dtype=torch.int32)
        stream = torch.arange(streams, dtype=torch.int32)
        found[:, 0] = found[:, 1] = first_slot + stream
        found[:, 2], found[:, 3], found[:, 4] = stream * tokens, tokens, position
        return found.to(self.device)

    def step(
        self, x: torch.Tensor, items: torch.Tensor, out: torch.Tensor | None, tile: StepTile | None, *, writes: bool
    ) -> None:
        if isinstance(self.vectors, DeltaVectors):
            assert isinstance(self.shape, DeltaShape)
            delta_step(
                x, self.vectors, self.states, items, out, self.shape, self.state, eps=EPS, writes=writes,
                tile=tile or delta_decode.STEP,
            )  # fmt: skip
        else:
            assert isinstance(self.shape, MambaShape)
            scan_step(
                x, self.vectors, self.states, items, out, self.shape, self.state, writes=writes,
                tile=tile or mamba_decode.STEP,
            )  # fmt: skip

    def step_bytes(self, *, written: bool = True) -> int:
        """Of one stream: its matrices, what the convolution reads and keeps, and what goes in and out."""
        matrices = (self.state.values - self.state.conv_values) * 4 * (2 if written else 1)
        kept = (self.state.taps - 1 + written) * self.state.conv_width * 4
        return matrices + kept + 2 * (first_width(self.mixer) + mixed_width(self.mixer))


def expected(layer: Layer, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a token for each of the first slots, in float64: the answers and the matrices behind."""
    mixer, state, vectors = layer.mixer, layer.state, layer.vectors
    x, number = x.double(), len(x)
    slots = layer.states[:number].double()
    ring = slots[:, : state.conv_values].view(number, state.ring, state.conv_width)
    window = [x[:, : state.conv_width], *(ring[:, (position - back) % state.ring] for back in range(1, state.taps))]
    mixed = sum(each * vectors.conv.double()[:, state.taps - 1 - back] for back, each in enumerate(window))
    matrix = slots[:, state.conv_values :].view(number, *state.matrices)
    assert isinstance(mixed, torch.Tensor)
    if isinstance(mixer, GatedDeltaNet):
        assert isinstance(vectors, DeltaVectors)
        mixed, rest = functional.silu(mixed), x[:, state.conv_width :]
        gates, betas, steps = torch.split(rest, [mixer.value_width, layer.heads, layer.heads], 1)
        queries, keys, values = torch.split(mixed, [mixer.key_width, mixer.key_width, mixer.value_width], 1)
        queries, keys = (
            (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                layer.heads // mixer.num_key_heads, 1
            )
            for each in (part.view(number, mixer.num_key_heads, mixer.key_dim) for part in (queries, keys))
        )
        left = (vectors.decay.double() * functional.softplus(steps + vectors.dt_bias.double())).exp()
        matrix = matrix * left[:, :, None, None]
        known = torch.einsum("nhk,nhkv->nhv", keys, matrix)
        written = betas.sigmoid()[:, :, None] * (values.view(number, layer.heads, -1) - known)
        matrix = matrix + keys[..., None] * written[:, :, None]
        found = torch.einsum("nhk,nhkv->nhv", queries * mixer.key_dim**-0.5, matrix)
        found = found / (found.square().mean(-1, keepdim=True) + EPS).sqrt() * vectors.norm.double()
        return found.flatten(1) * functional.silu(gates), matrix
    assert isinstance(vectors, MambaVectors) and vectors.conv_bias is not None
    mixed = functional.silu(mixed + vectors.conv_bias.double())
    own, both = mixed[:, : mixer.width].view(number, layer.heads, -1), mixed[:, mixer.width :]
    both = both.view(number, 2, mixer.num_groups, -1).repeat_interleave(layer.heads // mixer.num_groups, 2)
    lengths = functional.softplus(x[:, -layer.heads :] + vectors.dt_bias.double())
    lengths = lengths.clamp(mixer.shortest_step, mixer.longest_step)
    matrix = matrix * (vectors.decay.double() * lengths).exp()[:, :, None, None]
    matrix = matrix + (own * lengths[:, :, None])[..., None] * both[:, 0, :, None]
    found = torch.einsum("nhps,nhs->nhp", matrix, both[:, 1]) + vectors.skip.double()[:, None] * own
    return found.flatten(1), matrix


def error(layer: Layer, tile: StepTile | None) -> tuple[float, float]:
    """Of the answers, which have 16 bits, and of the matrices."""
    x, out = layer.tokens(CHECKED)
    answers, matrices = expected(layer, x, 9)
    layer.step(x, layer.items(0, CHECKED), out, tile, writes=True)
    behind = layer.states[:CHECKED, layer.state.conv_values :].double().view(matrices.shape)
    return float((out.double() - answers).norm() / answers.norm()), float((behind - matrices).norm() / matrices.norm())


def us_each(launches: list[Callable[[], None]]) -> float:
    """Of a launch, among others in a captured graph."""
    if is_rehearsal():
        launches[0]()
        return 0.0
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return median_us(graph.replay, 7) / len(launches)


def tell(name: str, us: float, num_bytes: int, note: str = "") -> None:
    if not is_rehearsal():
        rate = num_bytes / us * 1e6
        say(f"{name:44} {us:8.1f} us  {rate / 1e9:6.0f} GB/s  {rate / MEMORY_RATE:6.1%}  {note}")


def time_steps(name: str, layer: Layer) -> None:
    for tile in TILES[type(layer.mixer)]:
        note = ""
        if is_rehearsal():
            x, out = layer.tokens(CHECKED)
            layer.step(x, layer.items(0, CHECKED), out, tile, writes=True)
        else:
            note = "errors {:.1e} {:.1e}".format(*error(layer, tile))
        for streams in STREAMS:
            x, out = layer.tokens(streams)
            sets = [layer.items(at * streams, streams) for at in range(min(layer.slots // streams, MOST_LAUNCHES))]
            us = us_each([partial(layer.step, x, items, out, tile, writes=True) for items in sets])
            tell(f"{name} {streams:3} {tuple(tile)}", us, streams * layer.step_bytes(), note)


def time_drafts(name: str, layer: Layer) -> None:
    for streams in DRAFTED_STREAMS:
        x, out = layer.tokens(streams * DRAFTED_TOKENS)
        number = min(layer.slots // streams, MOST_LAUNCHES)
        sets = [layer.items(at * streams, streams, DRAFTED_TOKENS) for at in range(number)]
        for kind, answer in (("verify", out), ("replay", None)):
            writes = answer is None
            us = us_each([partial(layer.step, x, items, answer, None, writes=writes) for items in sets])
            tell(f"{name} {kind} {streams} x {DRAFTED_TOKENS}", us, streams * layer.step_bytes(written=writes))


def prompt_kernels(layer: Layer, number: int) -> Iterator[tuple[str, float, Callable[[], None]]]:
    """Name, products' floating point operations and what launches it, of one prompt."""
    x, _ = layer.tokens(number)
    own, items = layer.mixer, layer.items(0, 1, number, 0)
    mixed = torch.zeros(number, own.conv_width, dtype=x.dtype, device=layer.device)
    tiles = torch.zeros(number // TILE, 2, dtype=torch.int32, device=layer.device)
    tiles[:, 1] = torch.arange(number // TILE) * TILE
    assert number < NO_TILE and number % TILE == 0
    states, shape, vectors = layer.states, layer.shape, layer.vectors
    bias = vectors.conv_bias if isinstance(vectors, MambaVectors) else None
    yield (
        "_tiles",
        0.0,
        partial(convolve_tiles, x, vectors.conv, bias, states, items, tiles, mixed, layer.state, gated=False),
    )
    yield "_keep_inputs", 0.0, partial(keep_inputs, x, states, items, layer.state, gated=False)
    found = torch.zeros(number, layer.heads * layer.state.matrices[-1], dtype=x.dtype, device=layer.device)
    times = 2.0 * number * layer.heads
    if isinstance(vectors, DeltaVectors):
        assert isinstance(shape, DeltaShape)
        solved, scores = (torch.zeros(number, layer.heads, TILE, dtype=x.dtype, device=layer.device) for _ in range(2))
        keys, values = shape.key_dim, shape.value_dim
        meetings, walked = 2 * TILE * keys + 4 * TILE * TILE, 3 * keys * values + 2 * TILE * values
        yield "_meet", times * meetings, partial(meet_in_tiles, x, mixed, vectors, items, tiles, solved, scores, shape)
        yield (
            "_walk",
            times * walked,
            partial(walk_over_tiles, x, mixed, vectors, states, items, solved, scores, found, shape, layer.state),
        )
    else:
        assert isinstance(shape, MambaShape)
        found = torch.zeros(number, shape.into_at, dtype=x.dtype, device=layer.device)
        rows, size = shape.head_dim, shape.state_size
        walked = TILE * size + 2 * rows * size + TILE * rows
        yield (
            "_scan_tiles",
            times * walked,
            partial(scan_tiles, x, mixed, vectors, states, items, found, shape, layer.state),
        )


def time_prompts(name: str, layer: Layer) -> None:
    for number in PROMPTS:
        for kernel, operations, launch in prompt_kernels(layer, number):
            us = us_each([launch] * 8)
            if not is_rehearsal():
                rate = f"{operations / us / 1e6:7.1f} TFLOP/s" if operations else ""
                say(f"{name} {number:5} tokens {kernel:14} {us:8.1f} us {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    options = parser.parse_args()
    torch.manual_seed(0)
    say(torch.cuda.get_device_name())
    for name, mixer in MIXERS.items():
        if options.only.lower() not in name.lower():
            continue
        layer = Layer(mixer)

        def everything(name: str = name, layer: Layer = layer) -> None:
            time_steps(name, layer)
            time_drafts(name, layer)
            time_prompts(name, layer)

        with compiled_ahead(everything):
            say(f"{name}: kernel, streams, (part, ahead, warps)")
            everything()
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
