"""Builds the forward pass of a batch as a program, from parts that all architectures share.

A layer is attention (grouped-query, or latent), then its feed-forward block. The norms are fused: a
producer of `hidden` leaves `gained` = hidden * gain of the next norm and partial sums of squares,
and its consumer multiplies its dot products by the norm's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from vkmoe.batch import BatchKind
from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.logits.operations import candidates, finish, pick_rows, soft_cap
from vkmoe.kernels.matvec.operations import embed, matvec
from vkmoe.kernels.norms.operations import NormInput, NormOutput, rms_norm
from vkmoe.kernels.tuning import Tuning
from vkmoe.models.kv_caches import KvAddresses, caching_layers
from vkmoe.models.layers.attention import MIXERS, AttentionBlock
from vkmoe.models.layers.feed_forward import FeedForwardBlock
from vkmoe.models.layers.layer_inputs import LayerInputs
from vkmoe.models.weights import ModelWeights
from vkmoe.models.workspace import Workspace
from vkmoe.modes import RESIDENT, ExpertMode


class _Append(Protocol):
    """Appends a part to a program, and returns the number of partials it leaves."""

    def __call__(self, op: OpContext, *, norm: NormInput, leaves: NormOutput) -> int: ...


class _Stage(NamedTuple):
    """Describes a part of a layer, with the gain of the norm before it; 0: there is no norm."""

    layer: int
    gain: int
    append: _Append


@dataclass(frozen=True)
class Decoder:
    """Builds the programs of a model; `mode` says what becomes of missed experts."""

    spec: ModelSpec
    tuning: Tuning
    weights: ModelWeights
    workspace: Workspace
    caches: tuple[KvAddresses, ...]
    mode: ExpertMode = RESIDENT

    @property
    def cache_bytes(self) -> list[int]:
        """List the bytes of the KV cache that each layer sees, of one sequence."""
        layers = caching_layers(self.spec)[: self.spec.n_layers]
        return [sum(self._mixer(index).kernels.state_bytes) for index in layers]

    def program(self, kind: BatchKind) -> Program:
        """Build the program of a kind of batches: all layers, then the head if rows want logits.

        Reads `params`, leaves `log` (and `logits`, `candidates`). Copies in and out are not in it.
        """
        program = Program(kind.phase if kind.n_logits else f"{kind.phase} without logits")
        op = OpContext(program, self.tuning, n_rows=kind.n_rows)
        if kind.phase == "prompt":
            self._append_prompt(op)
            self._append_picked_head(replace(op, n_rows=kind.n_logits))
            return program
        n_partials = self._append_layers(op)
        if kind.n_logits:
            op.mark("head")
            self._append_head(op, self._norm(n_partials))
        return program

    def _append_layers(self, op: OpContext) -> int:
        """Append the layers for rows to decode; returns the number of partials of a row."""
        parts = list(self._parts())
        gains = [*(part.gain for part in parts), self.weights.output_gain]
        op.mark("embed")
        n_partials = self._append_input(op, self._leaves(gains[0]))
        self._layer_inputs.append_all(op)
        for part, next_gain in zip(parts, gains[1:], strict=True):
            norm, leaves = self._norm(n_partials), self._leaves(next_gain)
            n_partials = part.append(op.of_layer(part.layer), norm=norm, leaves=leaves)
        return n_partials

    def _append_input(self, op: OpContext, leaves: NormOutput) -> int:
        """Append what the first layer reads, for rows to decode; returns the number of partials."""
        table, scale = self.weights.embeddings, self.spec.embedding_scale
        return embed(op.named("embed"), table, self.workspace.params, leaves, scale)

    def _append_prompt_input(self, op: OpContext) -> None:
        """Append hidden = what the first layer reads, for rows of prompts."""
        self._append_input(op, self._leaves(self.weights.layers[0].mixer.gain))

    def _append_prompt(self, op: OpContext) -> None:
        """Append the layers for rows of prompts."""
        feed_forward = FeedForwardBlock(self.spec, self.workspace, self.weights, self.mode)
        op.mark("embed")
        self._append_prompt_input(op)
        inputs = self._layer_inputs
        inputs.append_all_of_prompts(op)
        for index, layer in enumerate(self.weights.layers):
            of_layer = op.of_layer(index)
            self._mixer(index).append_prompt(of_layer)
            feed_forward.append_prompt(of_layer, index)
            if layer.input is not None:
                inputs.append_prompt(of_layer, index)

    def _append_picked_head(self, op: OpContext) -> None:
        """Append the head for rows that want logits among others, if there may be any.

        Their normed states are in `gained` then.
        """
        if not op.n_rows:
            return
        op.mark("head")
        space, width, gain = self.workspace, self.spec.width, self.weights.output_gain
        pick_rows(op.named("picked rows"), space.hidden, space.gained, width, space.params)
        normed, eps = op.named("norm"), self.spec.norm_eps
        rms_norm(normed, space.gained, space.gained, width, gain, eps)
        self._append_head(op)

    def _append_head(self, op: OpContext, norm: NormInput | None = None) -> None:
        """Append the logits of the first rows of `gained`, and the largest of each."""
        space, logits = self.workspace, op.named("logits")
        matvec(logits, (self.weights.output,), space.gained, space.logits, norm)
        if cap := self.spec.logit_cap:
            soft_cap(op.named("cap"), space.logits, self.spec.n_vocab, cap)
        top, lists = op.named("candidates"), space.candidate_lists
        candidates(top, space.logits, self.spec.n_vocab, lists, space.candidates)

    def close_program(self, program: Program) -> None:
        """Append the dispatch that tells the host that everything before it ran."""
        program.mark("finish")
        finish(program, self.workspace.params, self.workspace.log)

    def _parts(self) -> Iterator[_Stage]:
        """List what adds to the hidden state, in order: the parts of one layer after another."""
        spec, space = self.spec, self.workspace
        feed_forward = FeedForwardBlock(spec, space, self.weights, self.mode)
        for index, layer in enumerate(self.weights.layers):
            yield _Stage(index, layer.mixer.gain, self._mixer(index).append)
            yield _Stage(index, layer.feed_forward.gain, partial(feed_forward.append, index=index))
            if layer.input is not None:
                yield _Stage(index, 0, partial(self._layer_inputs.append, index=index))

    @property
    def _layer_inputs(self) -> LayerInputs:
        return LayerInputs(self.spec, self.workspace, self.weights)

    def _mixer(self, index: int) -> AttentionBlock:
        block = MIXERS[type(self.spec.layers[index].mixer)]
        layer, cache = self.weights.layers[index], self.caches[index]
        return block(self.spec, self.workspace, index, layer, cache)

    def _norm(self, n_partials: int) -> NormInput:
        spec = self.spec
        return NormInput(self.workspace.norm_partials, n_partials, spec.width, spec.norm_eps)

    def _leaves(self, gain: int) -> NormOutput:
        space = self.workspace
        return NormOutput(space.hidden, space.gained, space.norm_partials, gain)
