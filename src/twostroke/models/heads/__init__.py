"""Drafting heads as they are published: small networks that read a target model's hidden states and guess its next
tokens. Files become declarations and tensors here; what is computed with them is the backends'."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import Eagle3Head, load_eagle3
from twostroke.models.heads.medusa import MedusaHeads, load_medusa
from twostroke.models.heads.mtp import MtpHead, load_mtp
from twostroke.models.heads.mtp_names import MTP
from twostroke.models.spec import ModelSpec

Head = Eagle3Head | MedusaHeads | MtpHead
HEADS: dict[str, Callable[[str, ModelSpec], Head]] = {"eagle3": load_eagle3, "medusa": load_medusa}
"""By the name that they are asked for by."""


def load_head(method: str, folder: str | None, target: Checkpoint) -> Head:
    """`folder`: None of a block that the target's own files hold. Raises ModelError where it cannot be read, or was not
    made for such a target."""
    if method == MTP:
        return load_mtp(target)
    assert folder is not None
    return HEADS[method](folder, target.spec)
