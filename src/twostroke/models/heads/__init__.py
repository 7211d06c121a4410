"""Drafting heads as they are published: small networks that read a target model's hidden states and guess its next
tokens. Files become declarations and tensors here; what is computed with them is the backends'."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.models.heads.eagle3 import Eagle3Head, load_eagle3
from twostroke.models.heads.medusa import MedusaHeads, load_medusa
from twostroke.models.spec import ModelSpec

Head = Eagle3Head | MedusaHeads
HEADS: dict[str, Callable[[str, ModelSpec], Head]] = {"eagle3": load_eagle3, "medusa": load_medusa}
"""By the name that they are asked for by."""


def load_head(method: str, folder: str, target: ModelSpec) -> Head:
    """Raises ModelError where it cannot be read, or was not made for such a target."""
    return HEADS[method](folder, target)
