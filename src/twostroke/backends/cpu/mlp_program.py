"""What each row goes through alone, on the tape: an MLP, or experts and an MLP beside them; and how what a block found
joins the residual. Knows nothing of attention: `program.py` puts layers together."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from twostroke.backends.cpu.arguments import ActivationField, GatedField, NormField, ShareField, Wait, float_bits
from twostroke.backends.cpu.experts import ExpertNorms, ExpertRunner, LatentPair, LayerExperts
from twostroke.backends.cpu.layer_weights import LayerWeights, Projection, SharedExpert
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.rank_norm_program import Break, RankNormOperations
from twostroke.backends.cpu.row_operations import Columns, forms_read
from twostroke.backends.cpu.shape import plain_activation


class MlpOperations(RankNormOperations):
    """Adds them to a tape, with the buffers that a program has for them."""

    block_output: Floats
    """What blocks found, where it is not added to the residual at once."""
    _joins: bool
    _activation: str
    _normed: Operand
    _gated: Mapping[int, Operand]
    """What goes into the last product of a block, by width: of rows of one width, a thread's lie at their places in
    every layer."""
    _inner: Floats
    _experts: ExpertRunner | None
    _expert_layers: int
    _routed: Operand
    """The rows that go to experts, normed; of one layer."""
    _latent_rows: Floats
    """Of rows whose experts read fewer numbers than a row has: first those, then what the experts found."""
    _shared_output: Floats
    """What an MLP beside experts found, before its share of it is taken, or before it is normed."""

    def _add_mlp(self, layer: LayerWeights, factor: float = 1.0) -> None:
        """`factor`: what the residual is multiplied by behind it."""
        if layer.experts is not None:
            self._add_experts(layer, layer.experts, factor)
            return
        self._add_norm(self._normed, layer.mlp_norm, layer.mlp_in)
        gated = self._add_gated(layer.mlp_in, layer.mlp_out)
        self._add_to_residual(layer.mlp_out, gated, layer.post_mlp_norm, factor)

    def _add_experts(self, layer: LayerWeights, own: LayerExperts, factor: float) -> None:
        if own.norms is not None:
            self._add_experts_beside(layer, own, own.norms, factor)
            return
        assert self._experts is not None
        readers = [own.router] if own.latent is None else [own.router, own.latent.down]
        forms = {form: any(forms_read(reader)[form] for reader in readers) for form in forms_read(own.router)}
        forms["floats"] = True  # what experts are sent is made from floats
        fields = self._norm_fields(self._rows.hidden, layer.mlp_norm)
        self.tape.add("prepare" if layer.mlp_norm is None else "norm", fields | self._routed.fields(**forms))
        if own.latent is not None:
            self._add_projection(own.latent.down, self._routed, self._latent_rows, wait=Wait.NEVER)
        self._add_projection(own.router, self._routed, self._experts.router_logits, wait=Wait.ALWAYS)
        is_direct = layer.post_mlp_norm is None and not self._joins
        target = self._rows.hidden if is_direct else self.block_output
        if layer.shared is not None:
            self._add_shared_expert(layer.shared, layer.mlp_norm, target, adds=is_direct)
        adds = is_direct or layer.shared is not None
        if own.latent is None:
            self._add_met_experts(own, self._routed.floats, target, adds=adds)
        else:
            self._add_latent_experts(own, own.latent, target, adds=adds)
        if not is_direct:
            self._add_found(layer.post_mlp_norm, factor)

    def _add_experts_beside(self, layer: LayerWeights, own: LayerExperts, norms: ExpertNorms, factor: float) -> None:
        """The MLP reads what the layer's norm gave, the router and its experts the residual through norms of their own.
        What each part found is normed, and so is their sum."""
        assert self._experts is not None and layer.shared is not None and layer.post_mlp_norm is not None
        eps, whole = self._spec.norm_eps, self._spec.hidden_size
        found, total = (Columns(buffer, 0, whole) for buffer in (self.block_output, self._shared_output))
        self._add_norm(self._normed, layer.mlp_norm, layer.shared.mlp_in)
        gated = self._add_gated(layer.shared.mlp_in, layer.shared.mlp_out)
        self._add_projection(layer.shared.mlp_out, gated, self.block_output)
        self._add_break(adds=False)
        self._add_norm_columns(found, norms.after_shared, eps, target=total, wait=self._wait_for_rows())
        self._add_norm(self._normed, norms.router, own.router)
        self._add_projection(own.router, self._normed, self._experts.router_logits, wait=Wait.ALWAYS)
        fields = self._norm_fields(self._rows.hidden, norms.experts)
        self.tape.add("norm", fields | self._routed.fields(floats=True, quantised=False))
        self._add_met_experts(own, self._routed.floats, self.block_output, adds=False)
        self._add_break(adds=False)
        self._add_norm_columns(found, norms.after_experts, eps, target=total, accumulate=True)
        self._add_norm_add(self._shared_output, layer.post_mlp_norm, factor)

    def _add_latent_experts(self, own: LayerExperts, latent: LatentPair, target: Floats, *, adds: bool) -> None:
        """All have read their rows by the time that what they found is written there."""
        found = self._gated[latent.up.depth]
        self._add_met_experts(own, self._latent_rows, self._latent_rows, adds=False)
        fields = self._norm_fields(self._latent_rows, None)
        self._add_row_operation("prepare", fields, found, latent.up)
        self._add_projection(latent.up, found, target, accumulate=adds)

    def _add_met_experts(self, own: LayerExperts, normed: Floats, target: Floats, *, adds: bool) -> None:
        assert self._experts is not None
        self._experts.add(self.tape, self._expert_layers, own, self._rows.count, normed, target, adds)
        self._expert_layers += 1

    def _add_shared_expert(self, shared: SharedExpert, norm: Floats | None, target: Floats, *, adds: bool) -> None:
        """What it finds joins the target ahead of what experts find."""
        self._add_norm(self._normed, norm, shared.mlp_in)
        gated = self._add_gated(shared.mlp_in, shared.mlp_out)
        if shared.router is None:
            self._add_projection(shared.mlp_out, gated, target, accumulate=adds)
            return
        self._add_projection(shared.mlp_out, gated, self._shared_output)
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

    def _add_gated(self, mlp_in: Projection, mlp_out: Projection) -> Operand:
        """From normed rows to what goes down, in the forms that this reads; with a gate or without."""
        gated = self._gated[mlp_out.depth]
        if mlp_in.is_gated_product:
            self._add_gated_projection(mlp_in, mlp_out, gated)
            return gated
        self._add_projection(mlp_in, self._normed, self._inner)
        up = Columns(self._inner, mlp_in.columns[-1], mlp_out.depth)
        if len(mlp_in.columns) == 1:
            self._add_plain_activation(up, mlp_out, gated)
        else:
            self._add_activation(self._inner, up, mlp_out, gated)
        return gated

    def _add_plain_activation(self, up: Columns, reader: Projection, gated: Operand) -> None:
        """Of an MLP without a gate."""
        activation: dict[IntEnum, int] = {
            ActivationField.INPUT: up.place,
            ActivationField.STRIDE: up.stride,
            ActivationField.WIDTH: up.width,
            ActivationField.ROWS: self._rows.count,
        }
        self._add_row_operation(f"plain_{plain_activation(self._spec)}", activation, gated, reader)

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

    def _add_activation(self, gate: Floats, up: Columns, reader: Projection, gated: Operand) -> None:
        """Gates are the first columns of their rows."""
        activation: dict[IntEnum, int] = {
            ActivationField.INPUT: address_of(gate),
            ActivationField.STRIDE: gate.shape[1],
            ActivationField.UP: up.place,
            ActivationField.UP_STRIDE: up.stride,
            ActivationField.WIDTH: up.width,
            ActivationField.ROWS: self._rows.count,
        }
        self._add_row_operation(f"gated_{self._activation}", activation, gated, reader)

    def _add_to_residual(
        self, projection: Projection, operand: Operand, norm: Floats | None, factor: float = 1.0
    ) -> None:
        """A block's output joins the residual, through a norm of its own where the model has one."""
        if norm is None and not self._joins:
            self._add_projection(projection, operand, self._rows.hidden, accumulate=True)
            return
        self._add_projection(projection, operand, self.block_output)
        self._add_found(norm, factor)

    def _add_found(self, norm: Floats | None, factor: float) -> None:
        """What a block left in `block_output` joins the residual."""
        self._add_break(adds=norm is None)
        if norm is not None:
            self._add_norm_add(self.block_output, norm, factor)

    def _add_break(self, *, adds: bool) -> None:
        if self._joins:
            self.breaks.append(Break(len(self.tape.names), self._rows, adds=adds))

    def _add_norm_add(self, source: Floats, norm: Floats, factor: float) -> None:
        fields = self._norm_fields(source, norm)
        fields |= {NormField.ADD_TO: address_of(self._rows.hidden), NormField.FACTOR: float_bits(factor)}
        self.tape.add("norm_add", fields, wait=self._wait_for_rows())
