"""ONNX Runtime over what torch exports of an encoder: fused by its own optimiser, in float32 or brought to int8. Texts
go by length, in batches that are padded to their longest, as sentence-transformers has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from adapter_loop import serve
from tokenizers import Tokenizer

BATCH_TEXTS = 32


class OnnxRuntimeAdapter:
    def __init__(self, model: str, threads: int, precision: str = "float32", pooling: str = "first") -> None:
        folder = Path(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        path = str(_ensure_exported(folder, precision))
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.enable_padding()
        self._pooling = pooling

    def facts(self) -> dict[str, Any]:
        return {"versions": {"onnxruntime": onnxruntime.__version__, "python": sys.version.split()[0]}}

    def embed(self, texts: list[str]) -> list[list[float]]:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[list[float]] = [[] for _ in texts]
        for start in range(0, len(texts), BATCH_TEXTS):
            places = order[start : start + BATCH_TEXTS]
            for place, vector in zip(places, self._batch([texts[place] for place in places]), strict=True):
                vectors[place] = [float(value) for value in vector]
        return vectors

    def _batch(self, texts: list[str]) -> np.ndarray:
        encoded = self._tokenizer.encode_batch(texts)
        ids = np.array([one.ids for one in encoded], dtype=np.int64)
        mask = np.array([one.attention_mask for one in encoded], dtype=np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (states,) = self._session.run(["last_hidden_state"], inputs)
        if self._pooling == "first":
            found = states[:, 0]
        else:
            found = (states * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        return found / np.linalg.norm(found, axis=1, keepdims=True)


def _ensure_exported(folder: Path, precision: str) -> Path:
    target = folder / f"exported-{precision}.onnx"
    if target.exists():
        return target
    if precision == "int8":
        from onnx import TensorProto
        from onnxruntime.quantization import quantize_dynamic

        # What its optimiser fused has no types that the quantiser could infer.
        kind = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(_ensure_exported(folder, "float32"), target, extra_options=kind)
        return target
    import torch
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids=ids, attention_mask=mask, token_type_ids=texts).last_hidden_state

    plain = folder / "exported-plain.onnx"
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "last_hidden_state")}
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    torch.onnx.export(
        States().eval(),
        example,
        str(plain),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    config = encoder.config
    fused = optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    )
    fused.save_model_to_file(str(target))
    return target


if __name__ == "__main__":
    serve(OnnxRuntimeAdapter)
