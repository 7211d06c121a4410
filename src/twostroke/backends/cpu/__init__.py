"""The CPU backend: native code through llvmlite. Start at `backend.py`; `program.py` is the forward pass as a tape,
`kernels/` generates what the tape calls. Importing this costs nothing: numpy and llvmlite come with `create`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import BackendError
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.machine import Machine, MemorySpace, host_memory
from twostroke.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from twostroke.backends.cpu.backend import CpuBackend


class CpuFactory:
    name = "cpu"
    quantises_on_load = True

    suits = StepSizes(block_size=16, max_tokens_per_step=512, max_running=64)

    def supports(self, checkpoint: Checkpoint) -> str | None:
        from twostroke.backends.cpu import isa

        reason = isa.unsupported_platform() or _unsupported_shape(checkpoint)
        if reason is not None:
            return reason
        try:
            isa.choose()
        except (ImportError, OSError):  # OSError: its library is missing, or there is no room to map it
            return "llvmlite, which makes its native code, cannot be imported"
        except BackendError as error:
            return str(error)
        return None

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], kv_kind: str = "auto") -> int:
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.kv_kind import choose_kv_kind

        spec = checkpoint.spec
        return len(layers) * spec.num_kv_heads * choose_kv_kind(kv_kind, isa.choose()).token_bytes(spec.head_dim)

    def held_bytes(self, checkpoint: Checkpoint, name: str) -> int:
        from twostroke.backends.cpu.weights import held_bytes

        return held_bytes(checkpoint, name) if checkpoint.is_multiplied(name) else checkpoint.held_tensor_bytes(name)

    def memory(self, checkpoint: Checkpoint, here: Machine) -> MemorySpace:
        return host_memory(here, sum(self.held_bytes(checkpoint, name) for name in checkpoint.tensors))

    def decode_weights(self, checkpoint: Checkpoint, dtype: str, on: Device | None = None) -> None:
        """Both phases read the same."""

    def ceilings(self, checkpoint: Checkpoint, threads: int) -> Ceilings:
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.ceilings import machine_rates
        from twostroke.backends.cpu.weights import tile_kinds

        rates = machine_rates(isa.choose(), max(1, threads))
        quantised = any(kind.is_quantised for kind in tile_kinds(checkpoint))
        arithmetic = "8-bit integers" if quantised else "float32"
        return Ceilings(
            read_bytes_per_s=rates.read_bytes_per_s,
            multiply_adds_per_s=rates.dot_multiply_adds_per_s if quantised else rates.float_multiply_adds_per_s,
            source=f"measured on this machine: {rates.isa}, {arithmetic}, threads: {rates.threads}",
        )

    def create(
        self,
        checkpoint: Checkpoint,
        layout: KVLayout,
        *,
        max_context: int,
        max_tokens_per_step: int,
        threads: int,
        max_running: int = 64,
        kv_kind: str = "auto",
        dtype: str = "auto",
        pack_for_decode: bool = False,
        isa_name: str | None = None,
    ) -> CpuBackend:
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.backend import CpuBackend

        if dtype != "auto":
            raise BackendError(f"the cpu backend's arithmetic follows the weights' kind: it has no {dtype} to choose")
        return CpuBackend(
            checkpoint,
            layout,
            isa.choose(isa_name),
            max_context=max_context,
            max_tokens_per_step=max_tokens_per_step,
            threads=max(1, threads),
            kv_kind=kv_kind,
        )


def _unsupported_shape(checkpoint: Checkpoint) -> str | None:
    spec = checkpoint.spec
    if spec.moe is not None:
        return "it has no kernels for a mixture of experts"
    if spec.head_dim % 16:
        return f"its attention needs a head size that is a multiple of 16, and this model's is {spec.head_dim}"
    sizes = {
        "hidden size": spec.hidden_size,
        "intermediate size": spec.intermediate_size,
        "attention width": spec.num_heads * spec.head_dim,
    }
    for name, size in sizes.items():
        if size % 32:
            return f"its tiles need sizes that are multiples of 32, and this model's {name} is {size}"
    return None


FACTORY = CpuFactory()
