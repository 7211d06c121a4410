"""The CUDA backend: torch and Triton, behind the extra [cuda]. Start at `backend.py`; `model.py` is the forward pass,
`kernels/` what it launches. Importing this costs nothing: torch comes when a device was found and asked about."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.backends.cuda import device_here, kv_codes
from twostroke.backends.cuda.cards import CardsOfRanks, room_on
from twostroke.backends.cuda.formats import formats_of
from twostroke.backends.cuda.model_matrices import held_of, held_on, held_weight_bytes, read_bytes
from twostroke.backends.cuda.state_shape import STATE_BYTES, StateShape
from twostroke.backends.cuda.stored_codes import SMALLER
from twostroke.backends.cuda.supported import unsupported_layers
from twostroke.backends.interface import BackendSettings, HeadNeeds
from twostroke.core.errors import BackendError
from twostroke.core.formats import ANY_FORMATS, STORED, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step_sizes import StepSizes
from twostroke.cost.devices import Device
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import DecodeWeights, ModelShape
from twostroke.cost.step_cost import Coefficients
from twostroke.machine import Machine, MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import Head
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.heads.mtp import MtpHead
from twostroke.models.spec import GroupedAttention, LatentAttention, ModelSpec, Recurrent

if TYPE_CHECKING:
    from twostroke.backends.cuda.backend import CudaBackend
    from twostroke.backends.cuda.weights import Progress
    from twostroke.backends.interface import TuningProgress, TuningReport

ATTENTION_SHARE = 0.25
"""Of the time to tune: attention has few kernels, and products many."""
LEAST_CAPABILITY = (8, 0)
"""The first with bf16 matrix units and asynchronous copies."""
LAYER_S, EXPERTS_S = 15e-6, 15e-6
"""Of a layer, whatever its size: norms, rotation and the waits between kernels; and on top, to choose experts."""
FIRST_COEFFICIENTS = Coefficients(
    step_s=0.0,
    prefill_s=0.0,
    weights_alone=1.1,
    weights=1.1,
    matmul_in_shadow=0.0,
    matmul=1.12,
    attention=1.35,
    kv=1.3,
    sampled=1.05,
)
"""What steps took on an H200 for each second that its measured rates allow; other cards teach the engine as it runs."""


class CudaFactory(CardsOfRanks):
    name = "cuda"
    preferred_weights = ()
    smaller_weights = (STORED, *SMALLER)
    suits = StepSizes(block_size=64, max_tokens_per_step=8192, max_running=512, itl_target_ms=35.0)

    def supports(self, checkpoint: Checkpoint) -> str | None:
        reason = device_here.none_found() or _unsupported_shape(checkpoint)
        if reason is not None:
            return reason
        import torch

        if not torch.cuda.is_available():
            return "torch finds no CUDA device: is it a build without CUDA?"
        capability = torch.cuda.get_device_capability()
        if capability < LEAST_CAPABILITY:
            return f"it needs compute capability 8.0 or newer, and this device has {capability[0]}.{capability[1]}"
        return None

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        return formats_of(checkpoint, wish)

    def kv_bytes_per_token(self, checkpoint: Checkpoint, layers: tuple[int, ...], formats: Formats) -> int:
        attentions = [checkpoint.spec.layers[layer].attention for layer in layers]
        attending = [one for one in attentions if isinstance(one, GroupedAttention | LatentAttention)]
        states = (StateShape.of(one).values for one in attentions if isinstance(one, Recurrent))
        kept = sum(kv_codes.kv_code(checkpoint, formats).token_bytes(one) for one in attending)
        return kept + sum(states) * STATE_BYTES

    def head_needs(self, head: Head, formats: Formats) -> HeadNeeds | str:
        if isinstance(head, MedusaHeads):
            from twostroke.backends.cuda.medusa import medusa_needs

            return medusa_needs(head, formats, self.suits)
        spec = ModelSpec("head", head.spec.draft_vocab_size, head.spec.hidden_size, 1, (head.spec.layer,), 0.0)
        if (reason := unsupported_layers(spec)) is not None:
            return reason
        import torch

        from twostroke.backends.cuda.eagle3_weights import head_needs
        from twostroke.backends.cuda.mtp import mtp_needs
        from twostroke.backends.cuda.products import card_of
        from twostroke.backends.cuda.tuned_table import Choices

        card = card_of(torch.device("cuda"), torch.bfloat16)
        copies = Choices.on(card) if formats.arithmetic == "bf16" and card.has_hopper_kernels else None
        if isinstance(head, MtpHead):
            return mtp_needs(head, formats, self.suits, copies)
        return head_needs(head, formats, self.suits, copies)

    def companion_bytes(self, checkpoint: Checkpoint, formats: Formats) -> int:
        from twostroke.backends.cuda.draft_model import companion_bytes

        return companion_bytes(checkpoint, formats, self.suits)

    def held_bytes(self, checkpoint: Checkpoint, name: str, formats: Formats) -> int:
        return read_bytes(checkpoint, name, formats)

    def memory(self, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        room = room_on(checkpoint, formats, sizes)
        return MemorySpace(room.owner, room.total_bytes, max(0, room.free_bytes - room.beside_bytes), room.kv_share)

    def decode_weights(self, checkpoint: Checkpoint, formats: Formats, on: Device | None = None) -> DecodeWeights | str:
        if on is None:
            from twostroke.backends.cuda.products import decode_weights

            return decode_weights(checkpoint, formats)
        from twostroke.backends.cuda.kernels.product import Card
        from twostroke.backends.cuda.model_matrices import offered_on

        reason, card = _unsupported_shape(checkpoint), Card(on.name, on.hopper_sms or 0, on.hopper_sms is not None)
        return reason or offered_on(checkpoint, formats, card)

    def ceilings(self, checkpoint: Checkpoint, threads: int, formats: Formats) -> Ceilings:
        from twostroke.backends.cuda.ceilings import float8_multiply_adds_per_s, machine_rates

        rates = machine_rates()
        float8 = float8_multiply_adds_per_s() if formats.arithmetic == "fp8" else None
        source = f"measured on this {rates.device}: {'bf16' if float8 is None else 'fp8'}"
        return Ceilings(rates.memory_bytes_per_s, float8 or rates.multiply_adds_per_s, source)

    def first_coefficients(self, shape: ModelShape) -> Coefficients:
        layer_s = LAYER_S if shape.experts is None else LAYER_S + EXPERTS_S
        return replace(FIRST_COEFFICIENTS, step_s=layer_s * sum(group.num_layers for group in shape.kv_groups))

    def measured_limits(self) -> dict[str, float | str]:
        """What else `twostroke bench limits` shows."""
        from twostroke.backends.cuda.ceilings import machine_rates

        return machine_rates().as_figures()

    def tune(self, checkpoint: Checkpoint, formats: Formats, seconds: float, progress: TuningProgress) -> TuningReport:
        import torch

        from twostroke.backends.cuda.attention_table import keep
        from twostroke.backends.cuda.attention_tuning import tune_attention
        from twostroke.backends.cuda.backend import DTYPES
        from twostroke.backends.cuda.products import card_of
        from twostroke.backends.cuda.tuning import tune

        spec, started_s, dtype = checkpoint.spec, time.perf_counter(), DTYPES[formats.arithmetic]
        progress(0, 1, "attention")
        found = tune_attention(spec, dtype, started_s + ATTENTION_SHARE * seconds)
        keep(torch.cuda.get_device_name(), found.rows)  # whatever becomes of the products
        held = held_on(held_of(checkpoint, formats), spec, card_of(torch.device("cuda"), dtype))
        left_s = seconds - (time.perf_counter() - started_s)
        report = tune(spec, dtype, left_s, progress, held)
        changes, faults = [*found.changes, *report.changes], [*found.faults, *report.faults]
        return replace(report, changes=changes, faults=faults, seconds=time.perf_counter() - started_s)

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> CudaBackend:
        import torch

        from twostroke.backends.cuda.backend import DTYPES, CudaBackend
        from twostroke.backends.cuda.drafting import MAX_DRAFTS
        from twostroke.backends.cuda.head_loading import drafter_of
        from twostroke.backends.cuda.products import card_for
        from twostroke.backends.cuda.ranks import CardRanks
        from twostroke.backends.cuda.tuned_table import Choices

        if layout.block_size & (layout.block_size - 1):
            raise BackendError(f"the cuda backend needs KV blocks of a power of two tokens, not {layout.block_size}")
        own = settings.formats or self.formats(checkpoint)
        assert isinstance(own, Formats)
        device, drafter = torch.device("cuda"), None
        ranks = None if settings.place is None else CardRanks(settings.place, device)
        if len(settings.companions) > 1:
            names = " and ".join(one.method for one in settings.companions)
            raise BackendError(f"the cuda backend has room for one drafter on the device, not for {names} together")
        for one in settings.companions:
            dtype, kv_dtype = DTYPES[one.formats.arithmetic], DTYPES[one.formats.kv]
            drafter = drafter_of(
                one,
                checkpoint.spec,
                layout,
                dtype=dtype,
                kv_dtype=kv_dtype,
                max_context=settings.max_context,
                choices=Choices.on(card_for(device, dtype, one.formats)),
                has_copies=own.copies is not None,
            )
        try:
            return CudaBackend(
                checkpoint,
                layout,
                device=device,
                formats=own,
                drafter=drafter,
                max_context=settings.max_context,
                max_tokens_per_step=settings.max_tokens_per_step,
                max_running=settings.max_running,
                max_drafts=MAX_DRAFTS if settings.drafts else 0,
                progress=_progress_line(),
                listener=settings.listener,
                ranks=ranks,
            )
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            offered = self.decode_weights(checkpoint, own) if own.copies is not None else None
            packed, spare = "", ""
            if isinstance(offered, DecodeWeights):
                packed = f" and packed copies of them {offered.num_bytes / 1e9:.1f} GB"
                spare = ", spare the copies with --decode-weights plain"
            raise BackendError(
                f"{torch.cuda.get_device_name()} ran out of memory: the weights take "
                f"{held_weight_bytes(checkpoint, own) / 1e9:.1f} GB{packed} of its {total / 1e9:.1f}, "
                f"{free / 1e9:.1f} GB were left; give KV less with --kv-memory{spare}, or bound the step with "
                "--max-tokens-per-step"
            ) from error


def _unsupported_shape(checkpoint: Checkpoint) -> str | None:
    return unsupported_layers(checkpoint.spec)


def _progress_line() -> Progress | None:
    """Bytes loaded, on a terminal's standard error."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\rweights: {done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)

    return show


FACTORY = CudaFactory()
