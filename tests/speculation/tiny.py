"""Tiny random models with a tokenizer of bytes and a few words, and engines over them that draft as much as they are
told to: what is drafted depends on no clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.host.host_backend import MAX_DRAFTS, HostBackend
from twostroke.backends.interface import BackendSettings, Companion
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.sequence import Sequence
from twostroke.core.step import Drafts
from twostroke.engine.companions import plan_head
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import Head
from twostroke.models.heads.eagle3 import Eagle3Head
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.heads.mtp import MtpHead
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler
from twostroke.speculation.drafter import ComputingDrafter, Drafter
from twostroke.speculation.speculator import Speculator
from twostroke.text import harmony
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.token_bytes import BYTE_OF_CHARACTER, Spelling
from twostroke.text.tokenizer import Tokenizer

VOCAB_SIZE = 320
"""More than the tokenizer has, as with many models."""
WORDS = ("true", "false", "left", "right", '{"', '":', "name", "</think>")
SIGNS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.RETURN)
"""Control tokens; the last ends an answer."""
BLOCK_SIZE = 16
FACTORIES = {"cpu": CPU, "reference": REFERENCE}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 40,
        "head_dim": 32,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def make_checkpoint(folder: Path, shape: str = "llama", kind: WeightKind = WeightKind.F32, seed: int = 5) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({**_SIZES, **SHAPES[shape]}))
    return random_checkpoint(folder, kind, seed=seed)


def make_tokenizer() -> Tokenizer:
    vocabulary, merges = dict(BYTE_OF_CHARACTER), []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in SIGNS])
    end = backend.token_to_id(SIGNS[-1])
    assert end + 1 < VOCAB_SIZE
    return Tokenizer(
        backend,
        Spelling.BYTE_LEVEL,
        vocab_size=end + 1,
        bos_token_id=None,
        eos_token_id=end,
        eos_token_ids=frozenset({end}),
    )


@dataclass(frozen=True)
class Sizes:
    """Of an engine."""

    max_context: int = 160
    step_tokens: int = 64
    max_running: int = 8
    num_blocks: int = 90
    """Of each KV group: 80 are enough for all who run."""
    run_ahead: bool = True
    prefix_caching: bool = True
    threads: int = 1
    is_careless: bool = False
    """Whoever has room for a prompt is let in, however long the answers of others will be: many must give way."""

    def layout(self, *checkpoints: Checkpoint) -> KVLayout:
        """Of a model, and of those that draft for it, which keep all that they read."""
        groups = [
            KVGroup(group.layers, None if number else group.window, self.num_blocks, model=number)
            for number, checkpoint in enumerate(checkpoints)
            for group in checkpoint.spec.kv_groups()
        ]
        return KVLayout(BLOCK_SIZE, tuple(groups))

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_context=self.max_context,
            max_tokens_per_step=self.step_tokens,
            max_running=self.max_running,
            prefix_caching=self.prefix_caching,
        )


def make_backend(
    name: str,
    checkpoint: Checkpoint,
    sizes: Sizes,
    kv: str | None = None,
    layout: KVLayout | None = None,
    draft_model: Checkpoint | Head | None = None,
) -> HostBackend:
    factory = FACTORIES[name]
    formats = factory.formats(checkpoint, FormatWish(kv=kv))
    assert isinstance(formats, Formats), formats
    companions: tuple[Companion, ...] = ()
    if isinstance(draft_model, (Eagle3Head, MedusaHeads, MtpHead)):
        companions = (plan_head(draft_model, 1, factory).companion,)
    elif draft_model is not None:
        own = factory.formats(draft_model)
        assert isinstance(own, Formats), own
        companions = (Companion("draft", draft_model, own, 1),)
    settings = BackendSettings(
        sizes.max_context, sizes.step_tokens, sizes.threads, sizes.max_running, formats, companions
    )
    layout = layout or sizes.layout(checkpoint, *(companion.checkpoint for companion in companions))
    backend = factory.create(checkpoint, layout, settings)
    assert isinstance(backend, HostBackend)
    return backend


@dataclass
class Room(Drafting):
    """Room for a number of drafts at random, more often a few than many, as far as the request wants some: whether they
    pay is nobody's question."""

    seed: int = 0
    most: int = MAX_DRAFTS
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        asked = sequence.request.sampling.speculation
        if asked is not None:
            if asked.is_off:
                return None
            most = most if asked.max_drafts is None else min(most, asked.max_drafts)
        room = min(most, self.most, self._rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 32)))
        return Drafts(room) if room else None


def make_engine(
    name: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    sizes: Sizes,
    drafters: list[Drafter] | None = None,
    kv: str | None = None,
    room: Drafting | None = None,
    draft_model: Checkpoint | Head | None = None,
    around: Callable[[ComputingDrafter], Drafter] = lambda drafter: drafter,
) -> Engine:
    """`drafters` None: one token a step. `draft_model`, a model or a head, drafts before them; `around`: what stands
    between it and the rest."""
    backend = make_backend(name, checkpoint, sizes, kv, draft_model=draft_model)
    grammars = GrammarCompiler(Vocabulary.of(tokenizer))
    backend.use_grammars(grammars)
    drafting: Drafting | None = None
    everyone: list[Drafter] = []
    if drafters is not None:
        everyone = [*map(around, backend.companion_drafters), *drafters]
        backend.use_speculator(Speculator(everyone, VOCAB_SIZE))
        drafting = room or Room()
    scheduler = Scheduler(
        sizes.scheduler_config(),
        backend.layout,
        drafting=drafting,
        max_drafts=backend.max_drafts,
        policy="fifo",  # whoever gives way does so whatever the clock says
    )
    if sizes.is_careless:
        scheduler._admission.growth.more_tokens = lambda _: 0  # type: ignore[method-assign]
    return Engine(
        scheduler,
        backend,
        VOCAB_SIZE,
        tokenizer,
        grammars=grammars,
        run_ahead=sizes.run_ahead,
        draft_methods=[drafter.name for drafter in everyone],
    )
