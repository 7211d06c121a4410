"""The CPU backend: native code through llvmlite. Start at `backend.py`; `program.py` is the forward pass as a tape,
`kernels/` generates what the tape calls. Importing this costs nothing: numpy and llvmlite come with `create`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.backends.cpu.shape import latent_shape
from twostroke.backends.cpu.supported import unsupported_shape
from twostroke.backends.interface import BackendSettings
from twostroke.core.errors import BackendError
from twostroke.core.formats import ANY_FORMATS, STORED, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.machine import Machine, MemorySpace, host_memory
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import GroupedAttention, LatentAttention, Recurrent

if TYPE_CHECKING:
    from twostroke.backends.cpu.backend import CpuBackend


_BROUGHT_TO = ("int4", "fp8")
"""What else float weights may be brought to: packed as Q4_0 and Q8_0, whose tiles read them."""


class CpuFactory:
    name = "cpu"
    preferred_weights = ("q8_0", "q4_1")
    smaller_weights: tuple[str, ...] = ()
    """Decode is as fast as weights are read, and prefill multiplies 8-bit integers several times faster than floats.
    Q8_0 keeps SmolLM2's perplexity within 1% of its float weights', Q4_1 costs more of it."""

    suits = StepSizes(block_size=16, max_tokens_per_step=512, max_running=64)
    rank_unit = 32

    def supports(self, checkpoint: Checkpoint) -> str | None:
        from twostroke.backends.cpu import isa

        reason = isa.unsupported_platform() or unsupported_shape(checkpoint)
        if reason is not None:
            return reason
        try:
            isa.choose()
        except (ImportError, OSError):  # OSError: its library is missing, or there is no room to map it
            return "llvmlite, which makes its native code, cannot be imported"
        except BackendError as error:
            return str(error)
        return None

    def formats(
        self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS, isa_name: str | None = None
    ) -> Formats | str:
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.held_kinds import mixed, tile_kinds
        from twostroke.backends.cpu.kv_kind import KVKind, fastest

        weights, offered = wish.weights or STORED, (*self.preferred_weights, *_BROUGHT_TO)
        if weights not in (STORED, *offered):
            return f"it brings float weights to {', '.join(offered)}, not to {weights}"
        if wish.arithmetic is not None:
            return f"its arithmetic follows the weights' kind: it has no {wish.arithmetic} to choose"
        is_latent = any(isinstance(layer.attention, LatentAttention) for layer in checkpoint.spec.layers)
        kinds = [kind.value for kind in KVKind if not (is_latent and kind.has_scales)]
        if wish.kv is not None and wish.kv not in kinds:
            return f"it keeps {'latents' if is_latent else 'KV'} in {', '.join(kinds)}, not in {wish.kv}"
        is_quantised = any(kind.is_quantised for kind in tile_kinds(checkpoint, weights))
        return Formats(
            weights,
            arithmetic="int8" if is_quantised else "f32",
            kv=wish.kv or fastest(isa.choose(isa_name)).value,
            stored=checkpoint.main_kind().name,
            mixed=mixed(checkpoint, weights),
            reasons=(_kv_reason(wish),),
        )

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], formats: Formats) -> int:
        from twostroke.backends.cpu.kv_kind import KVKind

        kind, total = KVKind(formats.kv), 0
        for one in (checkpoint.spec.layers[layer].attention for layer in layers):
            if isinstance(one, LatentAttention):
                total += kind.element_bytes * latent_shape(one).kept_width
            elif isinstance(one, GroupedAttention):
                total += one.num_kv_heads * kind.token_bytes(one.head_dim)
            elif isinstance(one, Recurrent):
                total += 4 * one.state_values
        return total

    def held_bytes(self, checkpoint: Checkpoint, name: str, formats: Formats) -> int:
        from twostroke.backends.cpu.held_kinds import held_bytes
        from twostroke.backends.cpu.kv_kind import KVKind
        from twostroke.backends.cpu.latent_weights import is_plain, plain_bytes

        if is_plain(name):
            return plain_bytes(checkpoint, name, KVKind(formats.kv))
        if not checkpoint.is_multiplied(name):
            return checkpoint.held_tensor_bytes(name)
        return held_bytes(checkpoint, name, formats.weights)

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        return host_memory(here, self.companion_bytes(checkpoint, formats))

    def companion_bytes(self, checkpoint: Checkpoint, formats: Formats) -> int:
        return sum(self.held_bytes(checkpoint, name, formats) for name in checkpoint.tensors)

    def decode_weights(self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None) -> None:
        """Both phases read the same."""

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.ceilings import machine_rates

        rates = machine_rates(isa.choose(), max(1, threads))
        quantised = formats.arithmetic == "int8"
        arithmetic = "8-bit integers" if quantised else "float32"
        return Ceilings(
            read_bytes_per_s=rates.read_bytes_per_s,
            multiply_adds_per_s=rates.dot_multiply_adds_per_s if quantised else rates.float_multiply_adds_per_s,
            source=f"measured on this machine: {rates.isa}, {arithmetic}, threads: {rates.threads}",
        )

    def create(
        self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings, isa_name: str | None = None
    ) -> CpuBackend:
        from twostroke.backends.cpu import isa
        from twostroke.backends.cpu.backend import CpuBackend

        own = settings.formats or self.formats(checkpoint, isa_name=isa_name)
        assert isinstance(own, Formats)
        return CpuBackend(
            checkpoint,
            layout,
            isa.choose(isa_name),
            formats=own,
            max_context=settings.max_context,
            max_tokens_per_step=settings.max_tokens_per_step,
            threads=max(1, settings.threads),
            companions=settings.companions,
            join=settings.join,
            listener=settings.listener,
        )


def _kv_reason(wish: FormatWish) -> str:
    from twostroke.backends.cpu.kv_kind import KVKind

    if wish.kv is None:
        return "KV in the fastest of 16 bits on this CPU"
    has_scales = KVKind(wish.kv).has_scales
    return f"KV in {wish.kv} with a scale for each token and head" if has_scales else "KV as asked for"


FACTORY = CpuFactory()
