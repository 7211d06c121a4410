"""Quantised folders that somebody spoilt on purpose: whatever the config says and whatever the tensors are, there is a
checkpoint whose weights can be read, or one sentence."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.quantised.folders import ALL_FORMATS, arguments, make_native_mxfp4, make_quantised
from tests.models.quantised.published import PUBLISHERS, publish
from tests.models.tiny_checkpoints import make_tiny
from tests.properties import examples

from twostroke.core.errors import ModelError
from twostroke.models.families.fields import Fields
from twostroke.models.loading import load_checkpoint
from twostroke.models.quantised.methods import BESIDE_CONFIG, read_method, read_quantisation
from twostroke.models.quantised.scheme import Quantisation
from twostroke.models.weights.tensor import WeightKind

PLACED_OTHERWISE = {"qwen3_next": "fp8_block", "gpt_oss": "ct_mxfp4_stacks", "glm4": "awq", "lfm2_moe": "gptq_order"}
NATIVE = "gpt_oss native"
ALL = (*ALL_FORMATS, NATIVE, *(f"{variant} {name}" for variant, name in PLACED_OTHERWISE.items()))
"""Every format in a Llama, and some in families that put rows in order, stack experts or convolve."""
WORDS = ("int", "float", "group", "channel", "block", "Linear", "re:(a*)*b", "re:(", "re:.*", "*", "gptq")
SHAPES = ((), (0,), (1,), (3, 5), (2, 2, 2), (64, 64))
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
        st.sampled_from(WORDS),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
DTYPES = (torch.int32, torch.int8, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each is written once, when it is first asked for."""
    made: dict[str, Path] = {}

    def folder_of(form: str) -> Path:
        if form not in made:
            target = tmp_path_factory.mktemp(form.replace(" ", "-"))
            variant, _, name = form.partition(" ")
            made[form] = (
                make_native_mxfp4(target)[0]
                if form == NATIVE
                else publish(make_tiny(variant, target / "plain")[0], target, PUBLISHERS[name])[0]
                if name
                else make_quantised(form, target)[0]
            )
        return made[form]

    return folder_of


def reads_or_says_why(folder: Path) -> dict[str, WeightKind] | str:
    """The kinds of what was read, or the sentence."""
    try:
        checkpoint = load_checkpoint(folder)
        for name, shape in checkpoint.spec.tensor_shapes().items():
            assert checkpoint.tensors[name].to_float32().shape == shape
    except ModelError as error:
        assert 0 < len(str(error)) < 700 and "\n" not in str(error)
        return str(error)
    return {name: tensor.kind for name, tensor in checkpoint.tensors.items()}


def settings_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """The file that says how the folder is quantised, and what it holds."""
    for file, _, _ in BESIDE_CONFIG:
        if (folder / file).is_file():
            return file, json.loads((folder / file).read_text())
    config = json.loads((folder / "config.json").read_text())
    section = next(name for name in ("quantization_config", "compression_config") if name in config)
    return "config.json", {section: config[section]}


def with_tensors(folder: Path, place: str, tensors: dict[str, torch.Tensor]) -> Path:
    target = folder.parent / place
    shutil.copytree(folder, target, dirs_exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


@pytest.mark.parametrize("form", ALL)
@examples(6)
@given(data=st.data())
def test_any_setting_may_be_anything(folders: Callable[[str], Path], form: str, data: st.DataObject) -> None:
    folder = folders(form)
    file, spoilt = settings_of(folder)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(spoilt)[1:]))
        owner: Any = spoilt
        for key in path:
            owner = owner[key]
        if isinstance(owner, dict) and data.draw(st.booleans()):
            owner[data.draw(st.text(max_size=5))] = data.draw(JSON)
        owner[last] = data.draw(JSON)
    config = json.loads((folder / "config.json").read_text())
    target = folder.parent / "config"
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / file).write_text(json.dumps(config | spoilt if file == "config.json" else spoilt))
    found = reads_or_says_why(target)
    if isinstance(found, dict):  # floats where the file has other numbers would be garbage, or a silent refusal
        assert all(kind.is_quantised for name, kind in found.items() if kinds_of(folder)[name].is_quantised)


@functools.cache
def kinds_of(folder: Path) -> dict[str, WeightKind]:
    return {name: tensor.kind for name, tensor in load_checkpoint(folder).tensors.items()}


HOSTILE_VALUES = (
    None,
    True,
    -1,
    0,
    2**70,
    0.5,
    float("nan"),
    "",
    "re:(",
    "x" * 100_000,
    [],
    [[]],
    [2**40] * 2,
    {"": {}},
)


@pytest.mark.parametrize("form", (*ALL_FORMATS, NATIVE))
def test_every_setting_with_every_hostile_value(folders: Callable[[str], Path], form: str) -> None:
    """What is understood names a format; what is not is told by the file's name and the setting's."""
    file, plain = settings_of(folders(form))
    for *path, last in places(plain)[1:]:
        for value in HOSTILE_VALUES:
            spoilt = copy.deepcopy(plain)
            owner: Any = spoilt
            for key in path:
                owner = owner[key]
            owner[last] = value
            try:
                found = settings_in(file, spoilt)
            except ModelError as error:
                assert file in str(error) and len(str(error)) < 700 and "\n" not in str(error)
            else:
                assert found is None or found.schemes == () or found.format


def settings_in(file: str, values: dict[str, Any]) -> Quantisation | None:
    if file == "config.json":
        return read_quantisation(Fields(file, values))
    section, method = next((section, method) for name, section, method in BESIDE_CONFIG if name == file)
    settings = values[section] if section else values
    if not isinstance(settings, dict):
        raise Fields(file, values).error(section or file, "must be an object")
    return read_method(Fields(file, settings), method)


def damaged(tensor: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Missing, of other types, cut, empty, with an axis more, turned."""
    yield None
    yield tensor.to(torch.float32) + 1
    yield tensor.to(torch.float32).to(torch.int64)
    yield tensor.reshape(-1)[:-1]
    yield tensor.reshape(-1)[:0]
    yield tensor[None, None]
    if tensor.ndim == 2:
        yield tensor.T
        yield tensor.repeat(2, 1)


@pytest.mark.parametrize("form", ALL)
def test_every_part_damaged_in_every_way(folders: Callable[[str], Path], form: str) -> None:
    """One sentence that names the matrix, or the matrix as it was but for what could be left out: never floats in its
    place."""
    folder = folders(form)
    tensors, kinds = load_file(folder / "model.safetensors"), kinds_of(folder)
    modules = {name.rpartition(".")[0] for name in tensors if not name.endswith((".weight", ".bias"))}
    matrix = next(name for name in sorted(modules) if re.search(r"layers.1.*(down|w2|q_proj|experts)", name))
    for part in [name for name in tensors if name.startswith(f"{matrix}.")]:
        for changed in damaged(tensors[part]):
            spoilt = {name: tensor for name, tensor in tensors.items() if name != part}
            if changed is not None:
                spoilt[part] = changed
            found = reads_or_says_why(with_tensors(folder, "parts", spoilt))
            if isinstance(found, str):
                assert matrix in found or "tensors are missing" in found, part
            else:
                assert found == kinds, part


@pytest.mark.parametrize("form", ALL)
@examples(5)
@given(data=st.data())
def test_any_tensor_may_be_anything(folders: Callable[[str], Path], form: str, data: st.DataObject) -> None:
    tensors = load_file(folders(form) / "model.safetensors")
    parts = sorted(name for name in tensors if ".1." in name)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(parts))
        own = tuple(tensors[name].shape) if name in tensors else (1,)
        shape = data.draw(st.sampled_from([own, *SHAPES]))
        numbers = np.random.default_rng(data.draw(st.integers(0, 9))).integers(-200, 200, shape)
        match data.draw(st.sampled_from(["replace", "remove", "rename"])):
            case "replace":
                tensors[name] = torch.from_numpy(numbers).to(data.draw(st.sampled_from(DTYPES)))
            case "remove":
                tensors.pop(name, None)
            case _ if name in tensors:
                others = [f"{name}_scale", name.replace(".1.", ".2."), "x.weight_packed"]
                tensors[data.draw(st.sampled_from(others))] = tensors.pop(name)
    reads_or_says_why(with_tensors(folders(form), "tensors", tensors))


KV_PARTS = ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "kv_scale", "x_scale")
KV_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn)
KV_NUMBERS = (1.0, 0.25, 0.0, -1.0, float("nan"), float("inf"), 1e30)


@examples(60)
@given(data=st.data())
def test_scales_of_kv_may_be_anything(folders: Callable[[str], Path], data: st.DataObject) -> None:
    """Of any layer, type, shape and value, missing or said twice."""
    folder = folders("ct_int4")
    tensors = load_file(folder / "model.safetensors")
    good = {f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([0.5]) for layer in range(3) for part in "kv"}
    tensors |= good
    for _ in range(data.draw(st.integers(0, 2))):
        layer, part = data.draw(st.sampled_from([0, 1, 2, 3, 10**20, "x"])), data.draw(st.sampled_from(KV_PARTS))
        name = data.draw(st.sampled_from([*good, f"model.layers.{layer}.self_attn.{part}"]))
        tensors.pop(name, None)
        if data.draw(st.booleans()):
            shape = data.draw(st.sampled_from([(), (1,), (2,), (0,), (2, 1), (70_000,)]))
            numbers = torch.full(shape, data.draw(st.sampled_from(KV_NUMBERS)))
            tensors[name] = numbers.to(data.draw(st.sampled_from(KV_DTYPES)))
    target = with_tensors(folder, "kv", tensors)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = arguments(8, "float", "tensor")
    (target / "config.json").write_text(json.dumps(config))
    if isinstance(reads_or_says_why(target), dict):
        scales = load_checkpoint(target).kv_scales
        assert scales is not None and scales.keys.keys() == scales.values.keys()
        for own in (*scales.keys.values(), *scales.values.values()):
            assert own.ndim == 1 and own.size and np.isfinite(own).all() and (own > 0).all()


@pytest.mark.parametrize("form", ALL)
@examples(3)
@given(data=st.data())
def test_a_file_may_end_anywhere(folders: Callable[[str], Path], form: str, data: st.DataObject) -> None:
    target = folders(form).parent / "cut"
    shutil.copytree(folders(form), target, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["model.safetensors", settings_of(target)[0]]))
    whole = (folders(form) / name).read_bytes()
    (target / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError):
        load_checkpoint(target)
    (target / name).write_bytes(whole)
