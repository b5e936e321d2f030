"""Builds the programs of what guesses tokens ahead: behind each token of a text, from the state
that the model left of it and from the next token, the one after that.

It is a layer, run as a model of one, or a drafter, a small model of its own. Their input is made
otherwise. A guess that is wrong costs its rows and nothing else, so that no bit of a text depends
on what is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from vkmoe.batch import BatchKind
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.logits.operations import pick_rows
from vkmoe.kernels.matmul.operations import matmul, matmul_residual, row_parts
from vkmoe.kernels.matvec.operations import matvec, matvec_residual
from vkmoe.kernels.norms.operations import NormInput, NormOutput, rms_norm
from vkmoe.models.decoder import Decoder
from vkmoe.models.weights import AheadWeights


@dataclass(frozen=True)
class GuessDecoder(Decoder):
    """Builds the programs of guesses; `spec` and `weights` are those of what guesses, as a model.

    Each runs behind the program whose rows' states it reads: one of the model, or of guesses where
    it `follows` another and guesses one token further. There its rows are those that wanted logits.
    """

    step: ClassVar[int] = 1  # positions from a guess to the one behind it

    ahead: AheadWeights | None = None
    follows: bool = False

    @property
    def _weights(self) -> AheadWeights:
        assert self.ahead is not None, self.spec.name
        return self.ahead

    @property
    def _states(self) -> TensorRef:
        states = self.workspace.states
        assert states is not None, self.spec.name
        return states


@dataclass(frozen=True)
class AheadDecoder(GuessDecoder):
    """Builds the programs of a layer that guesses."""

    def program(self, kind: BatchKind) -> Program:
        """Build the program of a kind of batches; the rows that want logits are picked in any."""
        program = Program(f"guess {kind.phase}")
        op = OpContext(program, self.tuning, n_rows=kind.n_rows)
        if kind.phase == "prompt":
            self._append_prompt(op)
        else:
            self._append_layers(op)
        self._append_picked_head(replace(op, n_rows=kind.n_logits))
        return program

    def _append_input(self, op: OpContext, leaves: NormOutput) -> int:
        space, weights = self.workspace, self._weights
        self._append_states(op)
        n_partials = super()._append_input(op, self._leaves(weights.token_gain))
        norm = self._norm(n_partials)
        matvec(op.named("token"), (weights.token,), space.gained, space.hidden, norm)
        return matvec_residual(op.named("state"), weights.state, self._states, leaves)

    def _append_prompt_input(self, op: OpContext) -> None:
        space, weights, spec = self.workspace, self._weights, self.spec
        self._append_states(op)
        gain, params, hidden = weights.token_gain, space.params, row_parts(space.hidden)
        super()._append_input(op, self._leaves(gain))
        normed = op.named("token norm")
        rms_norm(normed, space.hidden, space.gained, spec.width, gain, spec.norm_eps)
        matmul(op.named("token"), (weights.token,), row_parts(space.gained), hidden, params)
        states = row_parts(self._states)
        matmul_residual(op.named("state"), weights.state, states, hidden, params)

    def _append_states(self, op: OpContext) -> None:
        """Append states = the states that the program before left, normed once more.

        What the output matrix has read of guesses is in `gained`; of the model, no row may be.
        """
        space, states, weights = self.workspace, self._states, self._weights
        width, eps, found = self.spec.width, self.spec.norm_eps, space.gained
        if not self.follows:
            rms_norm(op.named("last norm"), space.hidden, states, width, weights.last_gain, eps)
            found = states
        rms_norm(op.named("state norm"), found, states, width, weights.state_gain, eps)


@dataclass(frozen=True)
class DraftDecoder(GuessDecoder):
    """Builds the programs of a drafter (Gemma 4's: `gemma4-assistant`).

    Its layers see keys and values of the model, up to the row whose state it reads; all guesses
    behind a row have the position behind that. The first program takes the states of the rows that
    want guesses from the model's, those that follow guess with these as rows to decode.
    """

    step: ClassVar[int] = 0

    def program(self, kind: BatchKind) -> Program:
        if self.follows:
            return super().program(kind)
        program, space, width = Program("states"), self.workspace, self._weights.state.n_columns
        op, states = OpContext(program, self.tuning, n_rows=kind.n_logits), self._states
        op.mark("head")
        pick_rows(op.named("picked rows"), space.hidden, states, width, space.params)
        gain, eps = self._weights.last_gain, self.spec.norm_eps
        rms_norm(op.named("last norm"), states, states, width, gain, eps)
        return program

    def _append_input(self, op: OpContext, leaves: NormOutput) -> int:
        space, weights = self.workspace, self._weights
        super()._append_input(op, NormOutput.alone(space.gained))
        matvec(op.named("token"), (weights.token,), space.gained, space.hidden)
        return matvec_residual(op.named("state"), weights.state, self._states, leaves)

    def _append_head(self, op: OpContext, norm: NormInput | None = None) -> None:
        super()._append_head(op, norm)
        assert self._weights.next_state is not None, self.spec.name
        further = (self._weights.next_state,)
        matvec(op.named("next state"), further, self.workspace.gained, self._states, norm)
