"""Builds the forward pass of one token as a program, from parts that all architectures share.

A layer is attention (grouped-query, or latent), then its feed-forward block. The norms are fused: a
producer of `hidden` leaves `gained` = hidden * gain of the next norm and partial sums of squares,
and its consumer multiplies its dot products by the norm's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from vkmoe.facts import ON_DEVICE, ExpertMode, ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.models.attention import MIXERS
from vkmoe.models.feed_forward import FeedForwardBlock
from vkmoe.models.weights import ModelWeights
from vkmoe.models.workspace import KvAddresses, Workspace
from vkmoe.ops.candidates import candidates, finish
from vkmoe.ops.context import OpContext
from vkmoe.ops.matvec import embed, matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.tuning import Tuning

__all__ = ["Decoder"]


class _Append(Protocol):
    """Appends a part to a program, and returns the number of partials it leaves."""

    def __call__(self, op: OpContext, *, norm: NormInput, leaves: NormOutput) -> int: ...


class _Part(NamedTuple):
    """Describes a part of a layer, with the gain of the norm before it."""

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
    mode: ExpertMode = ON_DEVICE

    @property
    def cache_bytes(self) -> list[int]:
        """List the bytes of each layer's KV cache."""
        kinds = (self.workspace.attention[layer.mixer] for layer in self.spec.layers)
        return [sum(kind.state_bytes) for kind in kinds]

    def token_program(self, with_logits: bool) -> Program:
        """Build a token's program: all layers; with logits also the output head and the candidates.

        Reads `params`, leaves `log` (and `logits`, `candidates`). Copies in and out
        are not in it.
        """
        program = Program("decode" if with_logits else "prompt")
        space, parts = self.workspace, list(self._parts())
        gains = [*(part.gain for part in parts), self.weights.output_gain]
        op = OpContext(program, self.tuning)
        op.mark("embed")
        leaves = self._leaves(gains[0])
        n_partials = embed(op.named("embed"), self.weights.embeddings, space.params, leaves)
        for part, next_gain in zip(parts, gains[1:], strict=True):
            norm, leaves = self._norm(n_partials), self._leaves(next_gain)
            n_partials = part.append(op.of_layer(part.layer), norm=norm, leaves=leaves)
        if with_logits:
            op.mark("head")
            norm, lists = self._norm(n_partials), space.candidate_lists
            matvec(op.named("logits"), (self.weights.output,), space.gained, space.logits, norm)
            top = op.named("candidates")
            candidates(top, space.logits, self.spec.n_vocab, lists, space.candidates)
        return program

    def close_program(self, program: Program) -> None:
        """Append the dispatch that tells the host that everything before it ran."""
        program.mark("finish")
        finish(program, self.workspace.params, self.workspace.log)

    def _parts(self) -> Iterator[_Part]:
        """List what adds to the hidden state, in order: the parts of one layer after another."""
        spec, space = self.spec, self.workspace
        feed_forward = FeedForwardBlock(spec, space, self.weights, self.mode)
        for index, layer in enumerate(self.weights.layers):
            block = MIXERS[type(spec.layers[index].mixer)]
            mixer = block(spec, space, index, layer, self.caches[index])
            yield _Part(index, layer.mixer.gain, mixer.append)
            yield _Part(index, layer.feed_forward.gain, partial(feed_forward.append, index=index))

    def _norm(self, n_partials: int) -> NormInput:
        spec = self.spec
        return NormInput(self.workspace.norm_partials, n_partials, spec.width, spec.norm_eps)

    def _leaves(self, gain: int) -> NormOutput:
        space = self.workspace
        return NormOutput(space.hidden, space.gained, space.norm_partials, gain)
