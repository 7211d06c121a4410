"""A head on the device beside the model's rows: what it reads of each token that passes, what it keeps of it, and how a
chain of drafts begins there and goes on. Knows no layer: what is made of the inputs is the head's to compute."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.kernels.head_states import (
    InputNorms,
    StateStore,
    begin_chain,
    go_on,
    keep_states,
    read_inputs,
)
from twostroke.backends.cuda.passes import TokenArrays
from twostroke.backends.cuda.rows import DeviceRows


class StateChain:
    def __init__(
        self,
        norms: InputNorms,
        states: StateStore,
        rows: DeviceRows,
        *,
        page: int,
        eps: float,
        normed_residual: bool = False,
    ) -> None:
        """`rows`: the model's; `normed_residual`: whether the head's residual begins as what its first norm gives."""
        self._norms, self._states, self._rows = norms, states, rows
        self._page, self._eps, self._normed_residual = page, eps, normed_residual

    def read(self, tokens: TokenArrays, joined: torch.Tensor, inputs: torch.Tensor) -> None:
        """Inputs of the slots of a pass: each token beside the state of the one before it."""
        own = tokens.token_ids, tokens.rows, tokens.positions
        last_tokens, page, eps = self._rows.last_tokens, self._page, self._eps
        read_inputs(self._norms, self._states, *own, last_tokens, joined, inputs, page=page, eps=eps)

    def keep(self, tokens: TokenArrays, joined: torch.Tensor) -> None:
        """The states of a pass, for what reads on from there."""
        keep_states(self._states, tokens.rows, tokens.positions, joined, page=self._page)

    def begin(
        self,
        rows: torch.Tensor,
        chain_rows: torch.Tensor,
        chain_positions: torch.Tensor,
        inputs: torch.Tensor,
        residual: torch.Tensor,
        *,
        steps: int,
    ) -> None:
        """The first step's inputs, from each row's last token; rows and positions of all steps are filled in."""
        begin_chain(
            self._norms, self._states, self._rows.sampling.records, self._rows.last_tokens, rows, chain_rows,
            chain_positions, inputs, residual, steps=steps, normed_residual=self._normed_residual, eps=self._eps,
        )  # fmt: skip

    def go_on(
        self,
        drafts: torch.Tensor,
        rows: torch.Tensor,
        state: torch.Tensor,
        inputs: torch.Tensor,
        residual: torch.Tensor,
        *,
        step: int,
    ) -> None:
        """A later step's inputs: the draft before it, beside the head's own state."""
        normed_residual = self._normed_residual
        go_on(
            self._norms, drafts, rows, state, inputs, residual, step=step, normed_residual=normed_residual,
            eps=self._eps,
        )  # fmt: skip
