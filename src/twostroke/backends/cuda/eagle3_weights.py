"""An EAGLE-3 head's tensors on the device, and room for what it computes. What the head leaves to its target is the
target's own. Knows how much that takes before any of it is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from twostroke.backends.cuda.buffers import tensor_bytes
from twostroke.backends.cuda.drafting import MAX_DRAFTS
from twostroke.backends.cuda.kernels.head_states import KEPT
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.layer_matrices import ModelMatrix
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.model_matrices import has_copy
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.cuda.weights import WeightLoader, Weights
from twostroke.backends.interface import Companion, HeadNeeds
from twostroke.core.formats import Formats
from twostroke.core.step_sizes import StepSizes
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec
from twostroke.models.spec import DenseMlp, ModelSpec

_VALUE_BYTES = 2


def layer_spec(spec: Eagle3Spec, max_context: int) -> ModelSpec:
    """The head as a model of one layer: what products and buffers ask for."""
    return ModelSpec("eagle3", spec.draft_vocab_size, spec.hidden_size, max_context, (spec.layer,), spec.norm_eps)


def head_matrices(spec: Eagle3Spec) -> list[ModelMatrix]:
    attention, mlp, hidden = spec.layer.grouped, spec.layer.mlp, spec.hidden_size
    assert isinstance(mlp, DenseMlp)
    width, joined = mlp.intermediate_size, len(spec.taps) * spec.target_hidden_size
    qkv = Product("plain", attention.query_width + attention.kv_values, 2 * hidden, has_bias=attention.qkv_bias)
    output = Product("join", hidden, attention.query_width, has_bias=attention.output_bias)
    return [
        ModelMatrix("fc", "fc", Product("plain", hidden, joined), ("fc",)),
        ModelMatrix("qkv", "qkv", qkv, ("q", "k", "v"), ("q_bias", "k_bias", "v_bias") if attention.qkv_bias else ()),
        ModelMatrix("o", "o", output, ("o",), ("o_bias",) if attention.output_bias else ()),
        ModelMatrix("gate_up", "gate_up", Product("gated", width, hidden), ("gate", "up")),
        ModelMatrix("down", "down", Product("join", hidden, width), ("down",)),
        ModelMatrix("head", "head", Product("head", spec.draft_vocab_size, hidden), ("output",)),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Weights:
    """Matrices are [outputs, inputs]; norms that a head lacks are None."""

    embedding: torch.Tensor
    fc: Matrix
    qkv: Matrix
    kv: Matrix  # the last rows of qkv: what is computed of tokens that ask for nothing
    o: Matrix
    gate_up: Matrix
    down: Matrix
    output: Matrix
    input_norm: torch.Tensor | None  # over all taps together
    fc_norms: tuple[torch.Tensor, ...]  # of each tap
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    final_norm: torch.Tensor
    target_ids: torch.Tensor  # int32 [draft vocabulary]
    own: tuple[Matrix, ...]
    """Those that are not the target's."""

    @staticmethod
    def placed(
        companion: Companion, target: Weights, device: torch.device, dtype: torch.dtype, copies: Choices | None
    ) -> tuple[Eagle3Weights, WeightLoader]:
        """As `Weights.placed`."""
        head = companion.head
        assert isinstance(head, Eagle3Head)
        loader, spec, stored = WeightLoader(companion.checkpoint, device, dtype), head.spec, head.tensors
        attention, matrices = spec.layer.grouped, {}
        for own in head_matrices(spec):
            if own.kind == "head" and "output" not in stored:
                continue
            weight = loader.place(own.tensors)
            bias = loader.place(own.biases) if own.biases else None
            matrices[own.kind] = Matrix(f"the head's {own.name}", own.product, {"plain": Plain(weight)}, bias)
            if copies is not None and dtype == torch.bfloat16 and has_copy(own, copies):
                matrices[own.kind].make_room_for_packed()
        qkv, first = matrices["qkv"], attention.query_width
        kv_bias = None if qkv.bias is None else qkv.bias[first:]
        kv_product = Product("plain", attention.kv_values, qkv.product.width, has_bias=qkv.product.has_bias)

        def norm(name: str) -> torch.Tensor | None:
            return loader.place((name,)) if name in stored else None

        weights = Eagle3Weights(
            embedding=loader.place(("embedding",)) if "embedding" in stored else target.embedding,
            fc=matrices["fc"],
            qkv=qkv,
            kv=Matrix("the head's kv", kv_product, {"plain": Plain(qkv.weight[first:])}, kv_bias),
            o=matrices["o"],
            gate_up=matrices["gate_up"],
            down=matrices["down"],
            output=matrices.get("head", target.output),
            input_norm=norm("input_norm"),
            fc_norms=tuple(loader.place((f"fc_norm.{index}",)) for index in range(len(spec.taps) * spec.fc_norm)),
            embedding_norm=loader.place(("embedding_norm",)),
            hidden_norm=loader.place(("hidden_norm",)),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            mlp_norm=loader.place(("mlp_norm",)),
            final_norm=loader.place(("final_norm",)),
            target_ids=torch.from_numpy(head.target_ids.astype(np.int32)).to(device),
            own=tuple(matrices.values()),
        )
        return weights, loader


class Eagle3Buffers:
    """Made once. What is read along has room for the largest step, what is guessed for all rows."""

    def __init__(
        self,
        spec: Eagle3Spec,
        *,
        num_tokens: int,
        num_rows: int,
        num_drafts: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def empty(rows: int, width: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=kind, device=device)

        hidden, attention = spec.hidden_size, spec.layer.grouped
        model = layer_spec(spec, spec.max_context)
        self.joined = empty(num_tokens, hidden)
        self.inputs = empty(num_tokens, 2 * hidden)
        self.kv = empty(num_tokens, attention.kv_values)
        self.residual, self.normed = empty(num_rows, hidden), empty(num_rows, hidden)
        self.qkv = empty(num_rows, attention.query_width + attention.kv_values)
        self.attention = empty(num_rows, attention.query_width)
        self.activated = empty(num_rows, model.dense_width)
        self.logits = empty(num_rows, spec.draft_vocab_size, torch.float32)
        self.rows, self.positions = (empty(num_drafts, num_rows, torch.int32) for _ in range(2))
        self.products = ProductScratch(model, num_rows, dtype, device)


def head_needs(head: Eagle3Head, formats: Formats, sizes: StepSizes, copies: Choices | None) -> HeadNeeds:
    """In 16 bits, as the model is. `sizes`: of steps, at most; `copies`: by which decode has some, if it has."""
    spec = head.spec
    buffers = Eagle3Buffers(
        spec,
        num_tokens=sizes.max_tokens_per_step,
        num_rows=sizes.max_running,
        num_drafts=MAX_DRAFTS,
        device=torch.device("meta"),
        dtype=torch.bfloat16,
    )
    held = sum(prod(tensor.shape) for tensor in head.tensors.values())
    taps = sizes.max_tokens_per_step * len(spec.taps) * spec.target_hidden_size
    kept = (sizes.max_running + 1) * KEPT * spec.hidden_size
    num_bytes = _VALUE_BYTES * (held + taps + kept) + tensor_bytes(buffers)
    if copies is not None:
        own = [matrix for matrix in head_matrices(spec) if all(name in head.tensors for name in matrix.tensors)]
        num_bytes += sum(matrix.packed_bytes for matrix in own if has_copy(matrix, copies))
    kv_bytes = _VALUE_BYTES * spec.layer.grouped.kv_values
    page_end_bytes = -(-_VALUE_BYTES * spec.hidden_size // sizes.block_size)  # of each block one state is kept
    return HeadNeeds(replace(formats, copies=None, reasons=()), num_bytes, kv_bytes + page_end_bytes)
