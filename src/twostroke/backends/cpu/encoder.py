"""BERT-like encoders in native code: the tape of a decoder, but that blocks are normed behind and MLPs have no gate.
Positions are looked up, and their sum with the tokens normed, in numpy: it is once a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import NormField
from twostroke.backends.cpu.layer_weights import LayerWeights
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.model import CpuModel
from twostroke.backends.cpu.program import Program
from twostroke.backends.host.arithmetic import layer_norm
from twostroke.backends.host.batch import Batch
from twostroke.models.checkpoint import Checkpoint


class EncoderProgram(Program):
    def _add_attention_in(self, layer: LayerWeights) -> None:
        hidden = self._norm_fields(self._rows.hidden, None)
        self._add_row_operation("prepare", hidden, self._normed, layer.attention_in)
        self._add_projection(layer.attention_in, self._normed, self._projected)

    def _add_attention(self, index: int, layer: LayerWeights) -> None:
        super()._add_attention(index, layer)
        self._add_layer_norm(layer.attention_norm, layer.attention_norm_bias)

    def _add_mlp(self, layer: LayerWeights, factor: float = 1.0) -> None:
        hidden = self._norm_fields(self._rows.hidden, None)
        self._add_row_operation("prepare", hidden, self._normed, layer.mlp_in)
        gated = self._add_gated(layer.mlp_in, layer.mlp_out)
        self._add_projection(layer.mlp_out, gated, self._rows.hidden, accumulate=True)
        self._add_layer_norm(layer.mlp_norm, layer.mlp_norm_bias)

    def _add_layer_norm(self, weight: Floats | None, bias: Floats | None) -> None:
        assert weight is not None and bias is not None
        fields = self._norm_fields(self._rows.hidden, weight) | {NormField.BIAS: address_of(bias)}
        self.tape.add("layer_norm", fields, wait=self._wait_for_rows())


class CpuEncoder(CpuModel):
    program_type = EncoderProgram

    def _keep_own_tensors(self, checkpoint: Checkpoint) -> None:
        names = ("position_embedding", "text_embedding", "embedding_norm", "embedding_norm_bias")
        self._places, self._texts, self._norm, self._norm_bias = (
            checkpoint.tensors[name].to_float32() for name in names
        )

    def _inputs(self, batch: Batch) -> npt.NDArray[np.float32]:
        places = self.spec.places
        assert places is not None
        rows = self._embed(batch.token_ids)
        rows += self._places[batch.positions + places.first_position]
        rows += self._texts[0] if batch.texts is None else self._texts[np.minimum(batch.texts, places.num_texts - 1)]
        return layer_norm(rows, self._norm, self._norm_bias, self.spec.norm_eps)
