"""GGUF files of kinds that llama.cpp's quantiser does not make of a model alone: a copy of a file, in which some
matrices hold blocks of the kind. Their codes are random, at half the spread of the weights that they replace: what is
asked of such a file is that two programs read it alike, not that it speaks. Needs the `gguf` package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.peers.home import Home

MADE_KINDS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "tq1_0", "tq2_0", "mxfp4", "nvfp4")
MADE_KINDS += ("made-q2_k", "made-iq3_xxs")  # of which llama.cpp's files of that name hold none, where rows are short
REPLACED = tuple(f"blk.{layer}.ffn_down.weight" for layer in (18, 20, 22, 24))
SHARE_OF_SPREAD = 0.5
"""Late matrices, at half their spread: a model that is all noise would answer every rounding with other logits."""
_SCALE_OFFSETS = {"tq1_0": 52, "tq2_0": 64}


def ensure_made(home: Home, source: Path, kind: str) -> Path:
    """The path of the file, made now if it is not there."""
    kind = kind.removeprefix("made-")
    target = home.models(source) / f"made-{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"unfinished-{os.getpid()}-{target.name}")
        _write(source, unfinished, kind)
        unfinished.rename(target)
    return target


def _write(source: Path, target: Path, kind: str) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    stored_as = gguf.GGMLQuantizationType[kind.upper()]
    for tensor in reader.tensors:
        data, data_kind = tensor.data, tensor.tensor_type
        if tensor.name in REPLACED:
            values = gguf.quants.dequantize(data, data_kind)
            data, data_kind = _blocks(kind, stored_as, values, gguf), stored_as
        writer.add_tensor(tensor.name, data, raw_dtype=data_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(kind: str, stored_as: Any, values: npt.NDArray[np.float32], gguf: Any) -> npt.NDArray[np.uint8]:
    """Of a matrix's shape and spread. Scales are set to one first, to see what the codes spread to."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[stored_as]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (values.size // block_values, block_bytes), dtype=np.uint8)
    rows = (len(values), -1)
    if kind == "tq1_0":  # every byte that five digits can be
        blocks[:, :52] = (rng.integers(0, 243, (len(blocks), 52)) * 256 + 242) // 243
    _set_scales(kind, blocks, 1.0)
    spread = float(gguf.quants.dequantize(blocks.reshape(rows), stored_as).std())
    _set_scales(kind, blocks, SHARE_OF_SPREAD * float(values.std()) / spread)
    return blocks.reshape(rows)


def _set_scales(kind: str, blocks: npt.NDArray[np.uint8], scale: float) -> None:
    bits = np.array([scale], dtype="<f2").view(np.uint8)
    match kind:
        case "iq1_m":  # four bits of an f16 on top of each of four words
            word = int(bits.view("<u2")[0])
            for index in range(4):
                place = 49 + 2 * index
                blocks[:, place] = (blocks[:, place] & 15) | ((word >> 4 * index & 15) << 4)
        case "mxfp4":
            blocks[:, 0] = 127 + round(np.log2(scale))
        case "nvfp4":  # an exponent of four bits, from -7 on, and no mantissa
            blocks[:, :4] = (7 + max(-6, round(np.log2(scale)))) << 3
        case "q2_k":
            blocks[:, 80:84] = np.tile(bits, 2)
        case _:
            first = _SCALE_OFFSETS.get(kind, 0)
            blocks[:, first : first + 2] = bits
