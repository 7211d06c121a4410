"""Whether a checkpoint is one whose states are pooled into a vector, and what that changes of its spec and of its
tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from twostroke.core.errors import ModelError
from twostroke.core.vectors import VectorFacts
from twostroke.models.answer_scores import (
    RERANKER,
    answer_tokens,
    is_reranker,
    logit_score_tokens,
    pooling_by_answer,
    pooling_by_score,
    pooling_of_rank_file,
)
from twostroke.models.families.declaration import Family, TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.families.gemma3 import DENSE_STEPS
from twostroke.models.families.qwen3 import SCORING
from twostroke.models.pooling import DenseStep, Pooling, States
from twostroke.models.sentence_folder import MODULES, read_sentence_folder
from twostroke.models.spec import ModelSpec, StepActivation
from twostroke.models.weights.tensor import WeightTensor

_QWEN3 = "Qwen3For"
_BARE = "Model"
"""How the architecture of a model without a head ends."""
_DECODER_PREFIX = "model."
_GGUF_STATES: dict[int, States] = {1: "mean", 2: "first", 3: "last"}
_GGUF_RANK = 4
_SIGMOID, _IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@dataclass(frozen=True, slots=True)
class FoundPooling:
    spec: ModelSpec
    pooling: Callable[[str, Mapping[str, WeightTensor]], Pooling]
    """Of what it is read from, and its tensors: a classifier's matrices are among the model's."""
    files: tuple[Path, ...] = ()
    """That its own weights are in."""


def pooling_of_folder(folder: Path, name: str, family: Family, spec: ModelSpec, config: Fields) -> FoundPooling | None:
    """None: it writes tokens."""
    architecture = str((config.get("architectures") or [""])[0])
    if architecture in family.classifiers:
        steps = family.classifiers[architecture]

        def classifier(source: str, stored: Mapping[str, WeightTensor]) -> Pooling:
            facts = VectorFacts(1, scores=True, is_plain=_is_plain(config))
            return Pooling("first", facts, _classifier(source, steps, spec, stored))

        return FoundPooling(as_pooled(spec), classifier)
    if (by_answer := _by_answer(folder, name, architecture)) is not None:
        return FoundPooling(as_pooled(spec), by_answer)
    found = read_sentence_folder(folder, spec.hidden_size, config)
    if found is not None:
        return FoundPooling(as_pooled(spec, found.max_tokens), lambda source, stored: found.pooling, found.files)
    if architecture.endswith(_BARE) or not spec.has_output:
        raise ModelError(
            f"{folder}: a {architecture} gives states of tokens, and no {MODULES} beside it says how they become a "
            "vector"
        )
    if not spec.is_causal:
        said = " (is_causal is false)" if config.get("is_causal") is False else ""
        raise ModelError(
            f"{folder}: its tokens see each other both ways{said}, and no {MODULES} says how they are pooled"
        )
    return None


def _by_answer(
    folder: Path, name: str, architecture: str
) -> Callable[[str, Mapping[str, WeightTensor]], Pooling] | None:
    """Of a language model that scores pairs."""
    is_named = architecture.startswith(_QWEN3) and is_reranker(folder, name)
    if architecture == SCORING:
        if not is_named:
            raise ModelError(
                f"{folder}: nothing says how a {architecture} is asked. Qwen3-Reranker's way is known, and taken where "
                f"the name of the model or of its folder has {RERANKER} in it"
            )
        return pooling_by_score
    tokens = logit_score_tokens(folder, MODULES)
    if tokens is None and is_named and not (folder / MODULES).is_file():
        tokens = answer_tokens(folder)
    return None if tokens is None else lambda source, stored: pooling_by_answer(source, tokens, stored)


def as_pooled(spec: ModelSpec, max_tokens: int | None = None) -> ModelSpec:
    """The spec of the same model without what scores tokens. `max_tokens`: the longest text, where that is less."""
    longest = spec.max_context if max_tokens is None else min(spec.max_context, max_tokens)
    return replace(spec, has_output=False, max_context=longest)


def bare_names(names: TensorNames, stored: Collection[str]) -> TensorNames:
    """Embedders are often saved without what a language model puts around the decoder, its name among it."""
    if not names.layer_prefix.startswith(_DECODER_PREFIX) or any(name.startswith(_DECODER_PREFIX) for name in stored):
        return names
    whole = {name.removeprefix(_DECODER_PREFIX): targets for name, targets in names.whole.items()}
    return replace(names, layer_prefix=names.layer_prefix.removeprefix(_DECODER_PREFIX), whole=whole)


def pooling_of_gguf(
    fields: Fields, spec: ModelSpec, metadata: Mapping[str, object], stored: Mapping[str, WeightTensor]
) -> Pooling | None:
    """None: it writes tokens. Such files say no more than this, and are read as normalised by all who read them."""
    if fields.get("pooling_type") in (None, 0):
        if not spec.is_causal:
            raise fields.error("pooling_type", "is missing, and tokens that see each other both ways have to be pooled")
        return None
    kind = fields.integer("pooling_type", 0, 1024)
    if kind == _GGUF_RANK and "cls.weight" in stored:
        steps = _classifier(fields.source, (("cls", "tanh"), ("cls.output", "identity")), spec, stored)
        return Pooling("first", VectorFacts(1, scores=True), steps)
    if kind == _GGUF_RANK:
        return pooling_of_rank_file(fields, metadata, stored)
    if kind not in _GGUF_STATES:
        raise fields.error("pooling_type", f"is {kind}, which is not known")
    steps = _gguf_steps(fields.source, stored, spec.hidden_size)
    width = steps[-1].weight.shape[0] if steps else spec.hidden_size
    return Pooling(_GGUF_STATES[kind], VectorFacts(width), steps, normalises=True)


def _gguf_steps(source: str, stored: Mapping[str, WeightTensor], width: int) -> tuple[DenseStep, ...]:
    """EmbeddingGemma's files may hold what its vectors go through."""
    steps = []
    for weight in (stored[name] for name in DENSE_STEPS if name in stored):
        if len(weight.shape) != 2 or weight.shape[1] != width:
            raise ModelError(f"{source}: {weight.name} has shape {weight.shape}, and {width} numbers come in")
        steps.append(DenseStep(weight))
        width = weight.shape[0]
    return tuple(steps)


def _classifier(
    source: str,
    steps: tuple[tuple[str, StepActivation], ...],
    spec: ModelSpec,
    stored: Mapping[str, WeightTensor],
) -> tuple[DenseStep, ...]:
    found, inputs = [], spec.hidden_size
    for name, activation in steps:
        weight, bias = stored.get(f"{name}.weight"), stored.get(f"{name}.bias")
        if weight is None or bias is None or len(weight.shape) != 2 or weight.shape[1] != inputs:
            raise ModelError(f"{source}: {name} is missing, or not a matrix of {inputs} inputs with a bias")
        if bias.shape != weight.shape[:1]:
            raise ModelError(f"{source}: {name}.bias has shape {bias.shape}, and {weight.shape[:1]} is asked for")
        inputs = weight.shape[0]
        found.append(DenseStep(weight, bias, activation))
    if inputs != 1:
        raise ModelError(f"{source}: it scores {inputs} labels, and a reranker has one")
    return tuple(found)


def _is_plain(config: Fields) -> bool:
    """What cross-encoders say of their scores, in the newer way or the older; nothing: they are brought between 0 and
    1."""
    section = config.section("sentence_transformers")
    told = config if section is None else section
    name = told.present("activation_fn", "sbert_ce_default_activation_function")
    activation = told.text(name, _SIGMOID)
    if activation not in (_SIGMOID, _IDENTITY):
        raise told.error(name, f"is {shown(activation)}; understood are {_SIGMOID} and {_IDENTITY}")
    return activation == _IDENTITY
