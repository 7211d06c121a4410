"""Models that draft beside the one that answers: what they take of the memory, and whether they belong together.
Reads no file: `build.py` does."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from twostroke.backends.interface import BackendFactory, Companion, CompanionFactory, HeadFactory, HeadNeeds
from twostroke.config import EngineConfig, ResolvedConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVContent, KVGroupNeed
from twostroke.core.units import size
from twostroke.engine.formats import choose_formats
from twostroke.machine import Machine, MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.rope import MAX_CONTEXT
from twostroke.models.heads import Head
from twostroke.models.heads.eagle3 import Eagle3Head
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.heads.mtp import MtpHead, expanded_values
from twostroke.models.heads.mtp_names import MTP
from twostroke.models.spec import GroupedAttention, LatentAttention, LayerSpec, ModelSpec
from twostroke.text.tokenizer import Tokenizer

_FLOAT32_BYTES = 4
_LEAST_BLOCK_SIZE = 16
FLOAT32 = Formats("f32", "f32", "f32")
_METHODS = {Eagle3Head: "eagle3", MedusaHeads: "medusa", MtpHead: MTP}
_PADDING = re.compile(rb"\[PAD\d+\]")
"""What files name entries that only fill a table up: they are no tokens."""


@dataclass(frozen=True, slots=True)
class CompanionPlan:
    """A companion with what it takes."""

    companion: Companion
    kv_needs: tuple[KVGroupNeed, ...]
    weight_bytes: int

    def line(self, resolved: ResolvedConfig) -> str:
        """What a user is told of it."""
        own, needs = resolved.layout.of_model(self.companion.number), self.kv_needs
        kv_bytes = sum(
            own.positions(group) * need.bytes_per_token for group, need in zip(own.groups, needs, strict=True)
        )
        name = self.companion.checkpoint.name
        if self.companion.head is not None:
            taken = f"{size(self.weight_bytes)} of weights and {size(kv_bytes)} of the KV"
            kind = self.companion.formats.arithmetic.replace("f32", "float32")
            further = isinstance(self.companion.head, MtpHead) and self.companion.head.has_further
            first = "; of the MTP blocks in its files the first makes all drafts" if further else ""
            return f"{self.companion.method} head {name}: {taken}, in {kind}{first}"
        return (
            f"{self.companion.method} model {name}: {size(self.weight_bytes)} of weights and {size(kv_bytes)} of the "
            f"KV; {self.companion.formats.line}"
        )


def plan_companion(
    method: str, checkpoint: Checkpoint, number: int, config: EngineConfig, factory: BackendFactory, here: Machine
) -> CompanionPlan:
    """Raises BackendError where the backend cannot run it beside another model."""
    what = f"the {method} model {checkpoint.name}"
    if not isinstance(factory, CompanionFactory):
        raise BackendError(f"the {factory.name} backend runs no second model yet: {what} cannot draft there")
    if (reason := factory.supports(checkpoint)) is not None:
        raise BackendError(f"{what} cannot run on the {factory.name} backend: {reason}")
    if any(group.content == "state" for group in checkpoint.spec.kv_groups()):
        raise BackendError(f"{what} cannot draft: it keeps states, which cannot be taken back where a draft fails")
    formats = choose_formats(config, checkpoint, here, factory, "").formats
    companion = Companion(method, checkpoint, formats, number)
    return CompanionPlan(companion, companion_needs(factory, companion), factory.companion_bytes(checkpoint, formats))


def plan_head(head: Head, number: int, factory: BackendFactory, formats: Formats = FLOAT32) -> CompanionPlan:
    """`formats`: of the model that it drafts for. Raises BackendError where the backend cannot run it beside that."""
    path = Path(head.source)
    method = _METHODS[type(head)]
    found = _head_needs(head, factory, formats)
    if isinstance(found, str):
        raise BackendError(f"{found}: {path.name} cannot draft there")
    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()
    needs: tuple[KVGroupNeed, ...] = ()
    if not isinstance(head, MedusaHeads):
        own = head.spec.layer.attention
        assert isinstance(own, GroupedAttention | LatentAttention)
        content: KVContent = "latent" if isinstance(own, LatentAttention) else "keys and values"
        layers, taps = (head.spec.layer,), tuple(tap - 1 for tap in head.spec.taps if tap > 0)
        needs = (KVGroupNeed((0,), None, found.kv_bytes_per_token, content, own.kv_values, number),)
    spec = ModelSpec(method, head.spec.draft_vocab_size, head.spec.hidden_size, MAX_CONTEXT, layers, 0.0)
    checkpoint = Checkpoint(path.resolve().name, path, spec, head.tensors)
    companion = Companion(method, checkpoint, found.formats, number, taps, head)
    return CompanionPlan(companion, needs, found.weight_bytes)


def _head_needs(head: Head, factory: BackendFactory, formats: Formats) -> HeadNeeds | str:
    if isinstance(factory, HeadFactory):
        found = factory.head_needs(head, formats)
        return f"the {factory.name} backend cannot run it: {found}" if isinstance(found, str) else found
    if not isinstance(factory, CompanionFactory):
        return f"the {factory.name} backend runs no heads yet"
    kv_bytes = 0
    if not isinstance(head, MedusaHeads):
        attention = head.spec.layer.attention
        assert isinstance(attention, GroupedAttention | LatentAttention)
        kv_bytes = attention.kv_values * _FLOAT32_BYTES + _block_end_bytes(head)
    if isinstance(head, MtpHead):
        num_values = expanded_values(head)
    else:
        num_values = sum(prod(tensor.shape) for tensor in head.tensors.values())
    return HeadNeeds(FLOAT32, num_values * _FLOAT32_BYTES, kv_bytes)


def _block_end_bytes(head: Eagle3Head | MtpHead) -> int:
    """Beside its KV a head keeps a joined hidden state for each block: a token's share of that, in the shortest
    blocks."""
    return -(-head.spec.hidden_size * _FLOAT32_BYTES // _LEAST_BLOCK_SIZE)


def companion_needs(factory: BackendFactory, companion: Companion) -> tuple[KVGroupNeed, ...]:
    """Its groups. They keep every token, also of layers that look back a window only: a drafter may lag behind the
    model, and what it has not computed yet must find what lies before it."""
    checkpoint, formats = companion.checkpoint, companion.formats
    layers: dict[tuple[KVContent, int], tuple[int, ...]] = {}
    for group in checkpoint.spec.kv_groups():
        kind = (group.content, group.values)
        layers[kind] = tuple(sorted((*layers.get(kind, ()), *group.layers)))
    return tuple(
        KVGroupNeed(own, None, factory.kv_bytes_per_token(checkpoint, own, formats), content, values, companion.number)
        for (content, values), own in layers.items()
    )


def beside(memory: MemorySpace, plans: tuple[CompanionPlan, ...]) -> MemorySpace:
    """What companions' weights leave."""
    taken = sum(plan.weight_bytes for plan in plans)
    return replace(memory, free_beside_weights_bytes=max(0, memory.free_beside_weights_bytes - taken))


def refuse_other_tokens(
    target: Checkpoint, companion: Checkpoint, tokenizer: Tokenizer | None, other: Tokenizer | None
) -> None:
    """A draft is a token id: it must mean the same to both. Raises BadRequestError with the first that does not."""
    sizes = target.spec.vocab_size, companion.spec.vocab_size
    if tokenizer is None or other is None:
        if sizes[0] != sizes[1]:
            raise BadRequestError(
                f"{companion.name} cannot draft for {target.name}: its vocabulary has {sizes[1]} tokens, and the "
                f"model's has {sizes[0]}"
            )
        return
    for token_id in range(max(sizes)):
        one, two = _token(tokenizer, token_id), _token(other, token_id)
        if one != two:
            raise BadRequestError(
                f"{companion.name} cannot draft for {target.name}: they have different tokenizers; token {token_id} is "
                f"{_shown(two)} there and {_shown(one)} in the model"
            )


def _token(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
    spelled = tokenizer.token_bytes(token_id)
    return (b"", False) if _PADDING.fullmatch(spelled) else (spelled, tokenizer.is_special(token_id))


def _shown(token: tuple[bytes, bool]) -> str:
    spelled, is_special = token
    if not spelled:
        return "none"
    return f"{'the special ' if is_special else ''}{spelled.decode('utf-8', 'backslashreplace')!r:.40}"
