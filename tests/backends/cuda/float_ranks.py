"""The CUDA backend in float32, on a card or in the interpreter, as a factory; run as a module, a rank's process of it.
Then tokens of several ranks are one rank's to the letter, which in bf16 last digits decide."""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from tests.backends.cuda.interpreter import adapt

    if __name__ == "__main__":
        adapt()

from tests.backends.cuda.tables import fused_up_to

from twostroke import backends
from twostroke.backends.cuda import CudaFactory
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.ranks import CardRanks
from twostroke.backends.cuda.results import CudaTicket
from twostroke.backends.cuda.supported import unsupported_layers
from twostroke.backends.interface import BackendSettings, CardRoom
from twostroke.backends.sharded import rank_process
from twostroke.backends.sharded.cards import CardsFactory
from twostroke.core.formats import ANY_FORMATS, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import Step
from twostroke.core.step_sizes import StepSizes
from twostroke.models.checkpoint import Checkpoint

MODULE = "tests.backends.cuda.float_ranks"
FAILS = "RANK_FAILS_AT_LAUNCH"
"""In the environment: the launch at which a rank above 0 raises."""


class Failing(CudaBackend):
    launches_left = int(os.environ.get(FAILS, "0"))

    def launch(self, step: Step) -> CudaTicket:
        self.launches_left -= 1
        if self.launches_left == 0:
            raise ValueError("as it was told to")
        return super().launch(step)


class FloatFactory(CudaFactory):
    rank_unit = 16

    def supports(self, checkpoint: Checkpoint) -> str | None:
        return unsupported_layers(checkpoint.spec)

    def formats(self, checkpoint: Checkpoint, wish: FormatWish = ANY_FORMATS) -> Formats | str:
        return Formats("f32", "f32", "f32")

    def num_cards(self) -> int:
        return 1

    def card_room(self, part: Checkpoint, formats: Formats, sizes: StepSizes, card: int) -> CardRoom:
        return CardRoom("a card", 10**9, 10**8 // 2, 10**7, 0.5)

    def create(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> CudaBackend:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        own = CardRanks(settings.place, device) if settings.place is not None else None
        kind = Failing if settings.place is not None and settings.place.rank else CudaBackend
        return kind(
            checkpoint,
            layout,
            device=device,
            formats=Formats("f32", "f32", "f32"),
            max_context=settings.max_context,
            max_tokens_per_step=settings.max_tokens_per_step,
            max_running=settings.max_running,
            choices=fused_up_to(0, device.type, torch.float32),
            max_drafts=0,
            ranks=own,
        )


FACTORY = FloatFactory()


class FloatRanks(CardsFactory):
    rank_module = MODULE

    def __init__(self, size: int) -> None:
        super().__init__(FACTORY, size, "gloo")


if __name__ == "__main__":
    backends.BACKENDS["cuda"] = MODULE
    sys.exit(rank_process.main())
