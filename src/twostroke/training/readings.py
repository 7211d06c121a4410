"""What the target makes of the texts that are learnt from. It is the same each time, so it is kept while there is room
for it, and made again where there was none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from twostroke import machine
from twostroke.training.answers import Text
from twostroke.training.target import Reading, Target

KEPT_SHARE = {"cuda": 0.4, "cpu": 0.2}
"""Of the memory that is free, what readings may take."""
_KEPT_BYTES = 2


class Readings:
    def __init__(self, target: Target, texts: Sequence[Text], max_tokens: int, room_bytes: int | None = None) -> None:
        """`max_tokens`: of a text; `room_bytes`: for all that is kept; None: a share of what is free."""
        self._target, self._max_tokens = target, max_tokens
        self.room_bytes = _free_bytes(target.device) if room_bytes is None else room_bytes
        width = target.spec.hidden_size * (1 + len(target.taps))
        self.wanted_bytes = sum(len(self._ids(text)) - 1 for text in texts) * width * _KEPT_BYTES
        """That all of them take."""
        self.num_read = 0
        """Texts that the target read, each as often as it did."""
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of a text
        self._kept_bytes = 0

    def of(self, texts: Sequence[Text]) -> Reading:
        """In the texts' order. In 16 bits, whether it was kept or not, so that what is learnt does not depend on the
        room that there was."""
        missing = [text for text in texts if id(text) not in self._kept]
        found = {id(text): self._kept[id(text)] for text in texts if id(text) in self._kept}
        if missing:
            self.num_read += len(missing)
            reading = self._target.read([self._ids(text) for text in missing])
            for row, text in enumerate(missing):
                count = len(self._ids(text)) - 1
                # Hidden states are beyond a float16 in some models; behind a norm they are not.
                own = reading.taps[row, :count].bfloat16(), reading.normed[row, :count].half()
                found[id(text)] = own
                self._keep(text, own)
        taps, normed = zip(*(found[id(text)] for text in texts), strict=True)
        return Reading(_filled_up(taps), _filled_up(normed))

    def _keep(self, text: Text, own: tuple[Tensor, Tensor]) -> None:
        num_bytes = sum(part.nbytes for part in own)
        if self._kept_bytes + num_bytes <= self.room_bytes:
            self._kept[id(text)] = own
            self._kept_bytes += num_bytes

    def _ids(self, text: Text) -> tuple[int, ...]:
        return text.token_ids[: self._max_tokens]


def _filled_up(parts: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(parts), batch_first=True).float()


def _free_bytes(device: torch.device) -> int:
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else machine.detect().available_memory_bytes
    return int(KEPT_SHARE[device.type] * free)
