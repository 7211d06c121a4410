"""The best this machine could do on each workload with this model file, by Twostroke's own measured ceilings and cost
arithmetic: the yardstick that every engine of a table shares, whatever its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.peers.metrics import MILLISECONDS
from bench.peers.workloads import Workload
from twostroke.backends import load_factory
from twostroke.backends.interface import BackendFactory
from twostroke.core.formats import Formats
from twostroke.cost.floor import decode_floor_s, prefill_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.engine.formats import kv_needs
from twostroke.engine.shape import shape_of
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint


class Yardstick:
    """One model's shape, and this machine's ceilings: the best of all the times they were measured in this run (not
    what an earlier day's cache holds), since a busy moment can only make them lower."""

    def __init__(self, source: Path, threads: int) -> None:
        self._checkpoint: Checkpoint = load_checkpoint(source, name=source.stem)
        self._threads = threads
        factory: BackendFactory = load_factory("cpu")
        formats = factory.formats(self._checkpoint)
        assert isinstance(formats, Formats), formats
        needs = kv_needs(factory, self._checkpoint, formats)
        self.shape: ModelShape = shape_of(self._checkpoint, [need.bytes_per_token for need in needs])
        self.ceilings: Ceilings = factory.ceilings(self._checkpoint, threads, formats)
        self.measured: list[Ceilings] = []
        """Each measurement of this run: a virtual machine's ceilings move with its neighbours."""

    def measure(self) -> None:
        """Measure the ceilings once more; takes a fraction of a second."""
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.ceilings import measure
        from twostroke.backends.cpu.weights import tile_kinds

        rates = measure(isa.choose(), self._threads)
        quantised = any(kind.is_quantised for kind in tile_kinds(self._checkpoint))
        multiply_adds = rates.dot_multiply_adds_per_s if quantised else rates.float_multiply_adds_per_s
        self.measured.append(
            replace(self.ceilings, read_bytes_per_s=rates.read_bytes_per_s, multiply_adds_per_s=multiply_adds)
        )
        self.ceilings = replace(
            self.ceilings,
            read_bytes_per_s=max(found.read_bytes_per_s for found in self.measured),
            multiply_adds_per_s=max(found.multiply_adds_per_s for found in self.measured),
        )

    def best_values(self, workload: Workload) -> dict[str, float]:
        """The workload's metrics as the ceilings would have them."""
        return best_values(self.shape, self.ceilings, workload)


def best_values(shape: ModelShape, ceilings: Ceilings, workload: Workload) -> dict[str, float]:
    if not workload.at_once:
        hit_s = prefill_floor_s(shape, workload.shared_prefix_tokens, workload.lengths()[0], ceilings)
        return {"hit_ttft_ms": hit_s * MILLISECONDS}
    if workload.num_requests > 1:
        tokens = workload.num_requests * workload.output_tokens
        return {"output_tokens_per_s": tokens / _batch_floor_s(shape, ceilings, workload)}
    (prompt_tokens,) = workload.lengths()
    contexts = range(prompt_tokens + 1, prompt_tokens + workload.output_tokens)
    decode_s = sum(decode_floor_s(shape, context, ceilings) for context in contexts)
    return {
        "prefill_tokens_per_s": prompt_tokens / prefill_floor_s(shape, 0, prompt_tokens, ceilings),
        "decode_tokens_per_s": len(contexts) / decode_s,
    }


def _batch_floor_s(shape: ModelShape, ceilings: Ceilings, workload: Workload) -> float:
    """Every prompt read, then every step of all streams together: by its arithmetic or by its bytes, the weights once
    for all streams, whichever takes longer."""
    lengths = workload.lengths()
    floor_s = sum(prefill_floor_s(shape, 0, length, ceilings) for length in lengths)
    parameters = shape.layer_matmul_parameters + shape.head_matmul_parameters
    for written in range(1, workload.output_tokens):
        contexts = [length + written for length in lengths]
        num_bytes = shape.weight_bytes_read(len(contexts)) + _sum(contexts, shape.kv_bytes_read)
        multiply_adds = parameters * len(contexts) + _sum(
            contexts, lambda context: shape.attention_multiply_adds(context - 1, 1)
        )
        floor_s += max(num_bytes / ceilings.read_bytes_per_s, multiply_adds / ceilings.multiply_adds_per_s)
    return floor_s


def _sum(contexts: list[int], of: Callable[[int], int]) -> int:
    return sum(of(context) for context in contexts)
