"""What each row goes through alone, on the tape: an MLP, or experts and an MLP beside them; and how what a block found
joins the residual. Knows nothing of attention: `program.py` puts layers together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from twostroke.backends.cpu.arguments import ActivationField, GatedField, NormField, ShareField, Wait
from twostroke.backends.cpu.experts import ExpertRunner, LayerExperts
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.row_operations import RowOperations, Rows, forms_read
from twostroke.backends.cpu.weights import LayerWeights, Projection, SharedExpert


@dataclass(frozen=True, slots=True)
class Break:
    """Where the tape stops for ranks to meet."""

    place: int  # the entry that it is before
    rows: Rows
    adds: bool = True
    """Whether the host adds what ranks found to the residual; else an entry behind it does, through a norm."""


class MlpOperations(RowOperations):
    """Adds them to a tape, with the buffers that a program has for them."""

    breaks: list[Break]
    block_output: Floats
    _joins: bool
    _activation: str
    _normed: Operand
    _gated: Operand
    _inner: Floats
    _experts: ExpertRunner | None
    _expert_layers: int
    _routed: Operand
    _shared_gated: Operand
    _shared_output: Floats

    def _add_mlp(self, layer: LayerWeights) -> None:
        if layer.experts is not None:
            self._add_experts(layer, layer.experts)
            return
        self._add_norm(self._normed, layer.mlp_norm, layer.mlp_in)
        self._add_gated(layer.mlp_in, layer.mlp_out, self._gated)
        self._add_to_residual(layer.mlp_out, self._gated, layer.post_mlp_norm)

    def _add_experts(self, layer: LayerWeights, own: LayerExperts) -> None:
        assert self._experts is not None
        forms = forms_read(own.router) | {"floats": True}  # what experts are sent is made from floats
        fields = self._norm_fields(self._rows.hidden, layer.mlp_norm)
        self.tape.add("prepare" if layer.mlp_norm is None else "norm", fields | self._routed.fields(**forms))
        self._add_projection(own.router, self._routed, self._experts.router_logits, wait=Wait.ALWAYS)
        if layer.shared is not None:
            self._add_shared_expert(layer.shared, layer.mlp_norm)
        target = self.block_output if self._joins else self._rows.hidden
        adds = not self._joins or layer.shared is not None
        normed = self._routed.floats
        self._experts.add(self.tape, self._expert_layers, own, self._rows.count, normed, target, adds)
        self._expert_layers += 1
        if self._joins:
            self.breaks.append(Break(len(self.tape.names), self._rows))

    def _add_shared_expert(self, shared: SharedExpert, norm: Floats | None) -> None:
        """What it finds joins the residual ahead of what experts find; of a rank, begins what ranks sum."""
        target, adds = (self.block_output, False) if self._joins else (self._rows.hidden, True)
        self._add_norm(self._normed, norm, shared.mlp_in)
        self._add_gated(shared.mlp_in, shared.mlp_out, self._shared_gated)
        if shared.router is None:
            self._add_projection(shared.mlp_out, self._shared_gated, target, accumulate=adds)
            return
        self._add_projection(shared.mlp_out, self._shared_gated, self._shared_output)
        fields: dict[IntEnum, int] = {
            ShareField.INPUT: address_of(self._shared_output),
            ShareField.WIDTH: self._spec.hidden_size,
            ShareField.NORMED: address_of(self._routed.floats),
            ShareField.ROUTER: address_of(shared.router),
            ShareField.ROWS: self._rows.count,
            ShareField.TARGET: address_of(target),
            ShareField.ACCUMULATE: int(adds),
        }
        self.tape.add("share", fields, wait=self._wait_for_rows())

    def _add_gated(self, mlp_in: Projection, mlp_out: Projection, gated: Operand) -> None:
        """From normed rows to what goes down, in the forms that this reads."""
        if mlp_in.is_one_matrix:
            self._add_gated_projection(mlp_in, mlp_out, gated)
        else:
            self._add_projection(mlp_in, self._normed, self._inner)
            self._add_activation(mlp_in, mlp_out, gated)

    def _add_gated_projection(self, mlp_in: Projection, mlp_out: Projection, gated: Operand) -> None:
        """Gate, up and the activation in one: what they pass on to each other never reaches memory."""
        matrix = mlp_in.parts[0].matrix
        tiles = matrix.num_tiles // 2
        fields: dict[IntEnum, int] = {
            GatedField.WEIGHTS: address_of(matrix.data),
            GatedField.UP_BYTES: tiles * matrix.data[0].nbytes,
            GatedField.DEPTH: matrix.depth,
            GatedField.NUM_TILES: tiles,
            GatedField.ROWS: self._rows.count,
        }
        fields |= self._normed.fields(floats=True, quantised=True, halves=True)
        fields |= gated.target_fields(**forms_read(mlp_out))
        name = f"matmul_gated_{matrix.kind.name.lower()}"
        self.tape.add(name, fields, wait=self._wait_for_rows(), matrix=matrix, pieces=self._pieces(matrix))

    def _add_activation(self, mlp_in: Projection, mlp_out: Projection, gated: Operand) -> None:
        activation: dict[IntEnum, int] = {
            ActivationField.INPUT: address_of(self._inner),
            ActivationField.STRIDE: mlp_in.width,
            ActivationField.UP_OFFSET: mlp_in.columns[1],
            ActivationField.WIDTH: gated.floats.shape[1],
            ActivationField.ROWS: self._rows.count,
        }
        self._add_row_operation(f"gated_{self._activation}", activation, gated, mlp_out)

    def _add_to_residual(self, projection: Projection, operand: Operand, norm: Floats | None) -> None:
        """A block's output joins the residual, through a norm of its own where the model has one."""
        if norm is None and not self._joins:
            self._add_projection(projection, operand, self._rows.hidden, accumulate=True)
            return
        self._add_projection(projection, operand, self.block_output)
        if self._joins:
            self.breaks.append(Break(len(self.tape.names), self._rows, adds=norm is None))
        if norm is None:
            return
        fields = self._norm_fields(self.block_output, norm) | {NormField.ADD_TO: address_of(self._rows.hidden)}
        self.tape.add("norm_add", fields, wait=self._wait_for_rows())
