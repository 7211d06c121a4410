"""A request checks what would break the order of the queue."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request


@pytest.mark.parametrize("priority", [float("nan"), 1.5, "high", None, True])
def test_priorities_are_integers(priority: object) -> None:
    with pytest.raises(BadRequestError, match="priority"):
        Request("r", (1,), priority=priority)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequestError, match="empty"):
        Request("r", ())
