"""What the files of `sentence-transformers` beside a model say: how its states are pooled, what the vector then goes
through, which prompts there are and how long a text may be. What is not understood is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.errors import ModelError
from twostroke.core.vectors import VectorFacts
from twostroke.models.families.fields import Fields, shown
from twostroke.models.json_files import read_json, read_json_list
from twostroke.models.pooling import DenseStep, Pooling, States
from twostroke.models.spec import StepActivation
from twostroke.models.weights.safetensors import open_safetensors
from twostroke.models.weights.tensor import WeightTensor

MODULES = "modules.json"
_MAX_DIMENSIONS = 2**20
_STATES: dict[str, States] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "root_mean",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Of several, the vector has them in this order."""
_MODES: dict[str, States] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "root_mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, StepActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    pooling: Pooling
    max_tokens: int | None
    """Of a text; None: what the model takes."""
    files: tuple[Path, ...]
    """That weights were read from."""


def read_sentence_folder(folder: Path, hidden_size: int, config: Fields) -> SentenceFolder | None:
    """None: the folder has no `modules.json`. `config`: the model's own."""
    if not (folder / MODULES).is_file():
        return None
    modules = [_module(entry) for entry in read_json_list(folder / MODULES)]
    kinds = [kind for kind, _ in modules]
    num_dense = kinds.count("Dense")
    if kinds not in (
        ["Transformer", "Pooling", *["Dense"] * num_dense],
        ["Transformer", "Pooling", *["Dense"] * num_dense, "Normalize"],
    ):
        known = "Transformer, Pooling, any number of Dense, and Normalize or none"
        raise ModelError(f"{folder / MODULES} has the modules {', '.join(kinds)}; understood is {known}, in this order")
    if modules[0][1] not in ("", "."):
        raise ModelError(f"{folder / MODULES}: the Transformer lies in {shown(modules[0][1])}, not beside it")
    prompts, default_prompt = _prompts(folder)
    states, *others = _states(_settings(folder, modules[1][1]), has_prompts=any(prompts.values()))
    steps, dimensions, files = [], hidden_size * (1 + len(others)), []
    for kind, path in modules[2:]:
        if kind == "Dense":
            step = _dense_step(folder, path, dimensions)
            steps.append(step)
            dimensions = step.weight.shape[0]
            files.append(folder / path / "model.safetensors")
    lowers_case, max_tokens = _text_settings(folder)
    facts = VectorFacts(
        dimensions,
        shorter=config.integers("matryoshka_dimensions", 1, dimensions),
        prompts=prompts,
        default_prompt=default_prompt,
        lowers_case=lowers_case,
    )
    pooling = Pooling(states, facts, tuple(steps), normalises=kinds[-1] == "Normalize", others=tuple(others))
    return SentenceFolder(pooling, max_tokens, tuple(files))


def _module(entry: Any) -> tuple[str, str]:
    fields = Fields(MODULES, entry if isinstance(entry, dict) else {})
    name, path = fields.text("type"), fields.text("path", "")
    package, _, kind = name.rpartition(".")
    if not package.startswith("sentence_transformers."):
        raise fields.error("type", f"is {shown(name)}: modules of other packages are code that is not run")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise fields.error("path", f"is {shown(path)}, which leaves the folder")
    return kind, path


def _settings(folder: Path, path: str) -> Fields:
    return Fields(f"{path}/config.json", read_json(folder / path / "config.json"))


def _states(fields: Fields, *, has_prompts: bool) -> list[States]:
    if has_prompts and not fields.flag("include_prompt", default=True):
        raise fields.error("include_prompt", "is false: pooling that leaves a prompt's tokens out is not supported")
    asked = fields.get("pooling_mode")
    if asked is None:
        chosen = [name for name, value in fields.values.items() if name.startswith("pooling_mode_") and value is True]
        if not chosen or not _STATES.keys() >= set(chosen):
            said = " and ".join(chosen) or "nothing"
            raise ModelError(f"{fields.source} asks for {said[:200]}; understood are {', '.join(_STATES)}")
        return [states for name, states in _STATES.items() if name in chosen]
    modes = asked if isinstance(asked, list) else [asked]
    if not modes or not all(isinstance(mode, str) and mode in _MODES for mode in modes):
        raise fields.error("pooling_mode", f"is {shown(asked)}; understood are {', '.join(_MODES)}, or a list of these")
    return [_MODES[mode] for mode in modes]


def _dense_step(folder: Path, path: str, inputs: int) -> DenseStep:
    fields = _settings(folder, path)
    name = fields.text("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        raise fields.error("activation_function", f"is {shown(name)}; understood are {', '.join(_ACTIVATIONS)}")
    outputs = fields.integer("out_features", 1, _MAX_DIMENSIONS)
    if fields.integer("in_features", 1, _MAX_DIMENSIONS) != inputs:
        raise fields.error("in_features", f"is {fields.get('in_features')}, and what comes before has {inputs}")
    file = folder / path / "model.safetensors"
    tensors = open_safetensors(file)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    if fields.flag("bias", default=True):
        shapes["linear.bias"] = (outputs,)
    weight, *biases = _exactly(str(file), tensors, shapes)
    return DenseStep(weight, biases[0] if biases else None, _ACTIVATIONS[name])


def _exactly(source: str, tensors: dict[str, WeightTensor], shapes: dict[str, tuple[int, ...]]) -> list[WeightTensor]:
    if tensors.keys() != shapes.keys():
        raise ModelError(f"{source} holds {', '.join(tensors)[:200]}; asked for are {', '.join(shapes)}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ModelError(f"{source}: {name} has shape {tensors[name].shape}, and {shape} is asked for")
    return [tensors[name] for name in shapes]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """By name, and the name of the default."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    fields = Fields(path.name, read_json(path))
    found = fields.section("prompts")
    by_name = {} if found is None else {name: found.text(name) for name in found.values}
    default = None if fields.get("default_prompt_name") is None else fields.text("default_prompt_name")
    if default is not None and default not in by_name:
        raise fields.error("default_prompt_name", f"is {shown(default)}, and there is no such prompt")
    return by_name, default


def _text_settings(folder: Path) -> tuple[bool, int | None]:
    """Whether texts are lowered, and how many tokens one may have."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return False, None
    fields = Fields(path.name, read_json(path))
    longest = None
    if fields.get("max_seq_length") is not None:
        longest = fields.integer("max_seq_length", 1, 2**31)
    return fields.flag("do_lower_case", default=False), longest
