"""The reference backend: numpy, float32, written to be read, and what the fast backends are tested against.
Start at `model.py`; `prefill.py` and `decode.py` hold what the two phases do differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.backends.interface import BackendSettings
from twostroke.core.formats import ANY_FORMATS, STORED, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.machine import Machine, MemorySpace, host_memory
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.features import uncomputed
from twostroke.models.spec import Recurrent

if TYPE_CHECKING:
    from twostroke.backends.reference.backend import ReferenceBackend

_FLOAT32_BYTES = 4


class ReferenceFactory:
    name = "reference"
    preferred_weights = ()
    smaller_weights: tuple[str, ...] = ()
    rank_unit = 1

    suits = StepSizes(block_size=16, max_tokens_per_step=512, max_running=64)

    def supports(self, checkpoint: Checkpoint) -> str | None:
        return uncomputed(checkpoint.spec, self.name)

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        if wish.weights not in (None, STORED):
            return "it multiplies by the weights as they are stored, in float32: it quantises none"
        if wish.arithmetic not in (None, "f32"):
            return f"it computes in float32 alone, not in {wish.arithmetic}"
        if wish.kv not in (None, "f32"):
            return f"it keeps KV in float32 alone, not in {wish.kv}"
        return Formats(STORED, "f32", "f32", stored=checkpoint.main_kind().name)

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], formats: Formats) -> int:
        attentions = (checkpoint.spec.layers[layer].attention for layer in layers)
        kept = (one.state_values if isinstance(one, Recurrent) else one.kv_values for one in attentions if one)
        return sum(kept) * _FLOAT32_BYTES

    def held_bytes(self, checkpoint: Checkpoint, name: str, formats: Formats) -> int:
        """Floors are those of the weights as they are stored, which is what others have to reach."""
        return checkpoint.held_tensor_bytes(name)

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        return host_memory(here, checkpoint.held_bytes())

    def companion_bytes(self, checkpoint: Checkpoint, formats: Formats) -> int:
        return checkpoint.held_bytes()

    def decode_weights(self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None) -> None:
        """Both phases read the same."""

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        from twostroke.backends.reference.ceilings import measure

        return measure()

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> ReferenceBackend:
        """Sizes and threads are hints that this backend has no use for: numpy allocates as it goes and its matrix
        products choose their own threads."""
        from twostroke.backends.reference.backend import ReferenceBackend

        return ReferenceBackend(checkpoint, layout, settings)


FACTORY = ReferenceFactory()
