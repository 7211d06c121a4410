"""Small valid files, written by the packages that define the formats."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from twostroke.models.weights.tensor import BLOCK_KINDS


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every weight kind, one to three dimensions, every type of key-value that the writer knows."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a small one, ünïcode ✓")
    writer.add_uint8("test.u8", 200)
    writer.add_int8("test.i8", -100)
    writer.add_uint16("test.u16", 60_000)
    writer.add_int16("test.i16", -30_000)
    writer.add_uint32("test.u32", 4_000_000_000)
    writer.add_int32("test.i32", -2_000_000_000)
    writer.add_uint64("test.u64", 2**64 - 1)
    writer.add_int64("test.i64", -(2**63))
    writer.add_float32("test.f32", 0.1)
    writer.add_float64("test.f64", 0.1)
    writer.add_bool("test.yes", True)
    writer.add_bool("test.no", False)
    writer.add_array("test.strings", ["", "a", "Ġthe", "漢字", "🙂"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -1.5])
    writer.add_array("test.bools", [True, False, True])
    rng = np.random.default_rng(0)
    for kind in BLOCK_KINDS:
        qtype = gguf.GGMLQuantizationType[kind.name]
        data = rng.integers(0, 256, (3, 2 * kind.block_bytes), dtype=np.uint8)
        writer.add_tensor(f"matrix.{kind.name}", data, raw_dtype=qtype)
    writer.add_tensor("vector", rng.standard_normal(7).astype(np.float32))
    writer.add_tensor("cube", rng.standard_normal((2, 3, 5)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def small_safetensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix.f32": torch.randn(3, 5, generator=generator),
        "vector.f16": torch.randn(7, generator=generator).half(),
        "cube.bf16": torch.randn(2, 3, 4, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "ünïcode": torch.ones(1),
        "nothing": torch.zeros(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path
