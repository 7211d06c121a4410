"""An engine without a model: every request gets a token a step, and the clock moves by one second a step. What the
workloads ask for, and when, can be read off it."""

from __future__ import annotations

from collections.abc import Sequence


class FakeEngine:
    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.left: dict[str, int] = {}
        self.now_s = 0.0
        self.widest = 0
        self.clears = 0

    def clock(self) -> float:
        return self.now_s

    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        name = str(len(self.asked))
        self.asked.append((list(token_ids), out_len))
        self.left[name] = out_len
        return name

    def step(self) -> list[tuple[str, int, bool]]:
        self.now_s += 1.0
        self.widest = max(self.widest, len(self.left))
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append((name, 1, self.left[name] == 0))
            if not self.left[name]:
                del self.left[name]
        return outputs

    def busy(self) -> bool:
        return bool(self.left)

    def clear_prefix(self) -> None:
        self.clears += 1
