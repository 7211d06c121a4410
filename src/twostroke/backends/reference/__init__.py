"""The reference backend: numpy, float32, written to be read, and what the fast backends are tested against.
Start at `model.py`; `prefill.py` and `decode.py` hold what the two phases do differently."""

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
    from twostroke.backends.reference.backend import ReferenceBackend

_FLOAT32_BYTES = 4


class ReferenceFactory:
    name = "reference"
    quantises_on_load = False

    suits = StepSizes(block_size=16, max_tokens_per_step=512, max_running=64)

    def supports(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.quantise_to is not None:
            return "it multiplies by the weights as they are stored, in float32: it quantises none"
        return None  # whatever a ModelSpec can say, it runs

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], kv_kind: str = "auto") -> int:
        _check_kv_kind(kv_kind)
        spec = checkpoint.spec
        return 2 * len(layers) * spec.num_kv_heads * spec.head_dim * _FLOAT32_BYTES

    def held_bytes(self, checkpoint: Checkpoint, name: str) -> int:
        """Floors are those of the weights as they are stored, which is what others have to reach."""
        return checkpoint.held_tensor_bytes(name)

    def memory(self, checkpoint: Checkpoint, here: Machine) -> MemorySpace:
        return host_memory(here, checkpoint.held_bytes)

    def decode_weights(self, checkpoint: Checkpoint, dtype: str, on: Device | None = None) -> None:
        """Both phases read the same."""

    def ceilings(self, checkpoint: Checkpoint, threads: int) -> Ceilings:
        from twostroke.backends.reference.ceilings import measure

        return measure()

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
    ) -> ReferenceBackend:
        """Sizes and threads are hints that this backend has no use for: numpy allocates as it goes and its matrix
        products choose their own threads."""
        from twostroke.backends.reference.backend import ReferenceBackend

        _check_kv_kind(kv_kind)
        if dtype != "auto":
            raise BackendError(f"the reference backend computes in float32 alone, not in {dtype}")
        return ReferenceBackend(checkpoint, layout, max_context)


def _check_kv_kind(kv_kind: str) -> None:
    if kv_kind != "auto":
        raise BackendError(f"the reference backend keeps KV in float32 alone, not in {kv_kind}")


FACTORY = ReferenceFactory()
