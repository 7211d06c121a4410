"""Quantised folders that somebody spoilt on purpose: whatever the config says and whatever the tensors are, there is a
checkpoint whose weights can be read, or one sentence."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.quantised.folders import FORMATS, make_quantised
from tests.properties import examples

from twostroke.core.errors import ModelError
from twostroke.models.families.fields import Fields
from twostroke.models.loading import load_checkpoint
from twostroke.models.quantised.methods import read_quantisation

SPOILT = ("ct_int4_asym", "ct_int4_order", "ct_int8_asym", "ct_nvfp4", "fp8_ragged_block", "gptq_order", "awq")
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: make_quantised(form, tmp_path_factory.mktemp(form))[0] for form in SPOILT}


def reads_or_says_why(folder: Path) -> None:
    try:
        checkpoint = load_checkpoint(folder)
        for name, shape in checkpoint.spec.tensor_shapes().items():
            assert checkpoint.tensors[name].to_float32().shape == shape
    except ModelError as error:
        assert 0 < len(str(error)) < 700 and "\n" not in str(error)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


@examples(150)
@given(st.data())
def test_any_setting_may_be_anything(folders: dict[str, Path], data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(folders)))
    spoilt = {"quantization_config": copy.deepcopy(FORMATS[form].config)}
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(spoilt)[1:]))
        owner: Any = spoilt
        for key in path:
            owner = owner[key]
        if isinstance(owner, dict) and data.draw(st.booleans()):
            owner[data.draw(st.text(max_size=5))] = data.draw(JSON)
        owner[last] = data.draw(JSON)
    try:
        found = read_quantisation(Fields("config.json", spoilt))
    except ModelError as error:
        assert str(error).startswith("config.json: ") and len(str(error)) < 700
        return
    if found is not None:
        assert found.schemes == () or found.format
        config = json.loads((folders[form] / "config.json").read_text()) | spoilt
        target = folders[form].parent / "config"
        shutil.copytree(folders[form], target, dirs_exist_ok=True)
        (target / "config.json").write_text(json.dumps(config))
        reads_or_says_why(target)


@examples(120)
@given(st.data())
def test_any_tensor_may_be_anything(folders: dict[str, Path], data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(folders)))
    tensors = load_file(folders[form] / "model.safetensors")
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
    target = folders[form].parent / "tensors"
    shutil.copytree(folders[form], target, dirs_exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    reads_or_says_why(target)


@examples(60)
@given(st.data())
def test_a_file_may_end_anywhere(folders: dict[str, Path], data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(folders)))
    target = folders[form].parent / "cut"
    shutil.copytree(folders[form], target, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    whole = (folders[form] / name).read_bytes()
    (target / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError):
        load_checkpoint(target)
    (target / name).write_bytes(whole)
