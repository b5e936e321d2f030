"""Builds the forward pass of one token as a program, from parts that all architectures share.

Per layer: attention (attention.py), then feed-forward (feed_forward.py). The norms are fused: a
producer of `hidden` leaves `gained` = hidden * gain of the next norm and partial sums of squares,
and its consumer multiplies its dot products by the norm's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.models.attention import AttentionBlock
from vkmoe.models.feed_forward import FeedForwardBlock, MissService
from vkmoe.models.weights import ModelWeights
from vkmoe.models.workspace import KvAddresses, Workspace
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape
from vkmoe.ops.candidates import candidates
from vkmoe.ops.context import OpContext
from vkmoe.ops.embed import embed
from vkmoe.ops.finish import finish
from vkmoe.ops.matvec import matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.tuning import Tuning

__all__ = ["Decoder"]


@dataclass(frozen=True)
class Decoder:
    """Builds the programs of a model. `misses` is None where no expert ever moves."""

    spec: ModelSpec
    tuning: Tuning
    weights: ModelWeights
    workspace: Workspace
    attention_shape: AttentionShape | LatentShape
    attention_split: AttentionSplit
    caches: tuple[KvAddresses, ...]
    misses: MissService | None = None

    def token_program(self, with_logits: bool) -> Program:
        """Build a token's program: all layers; with logits also the output head and the candidates.

        Reads `params`, leaves `log` (and `logits`, `candidates`). Copies in and out
        are not in it.
        """
        program = Program("decode" if with_logits else "prompt")
        space, layers = self.workspace, self.weights.layers
        gains = [*(layer.attention_gain for layer in layers), self.weights.output_gain]
        attention, feed_forward = self._blocks()
        program.mark("embed")
        op, leaves = OpContext(program, self.tuning, "embed"), self._leaves(gains[0])
        n_partials = embed(op, self.weights.embeddings, space.params, leaves)
        for index, layer in enumerate(layers):
            leaves = self._leaves(layer.feed_forward_gain)
            norm, cache = self._norm(n_partials), self.caches[index]
            n_partials = attention.append(program, index, layer.attention, cache, norm, leaves)
            norm, leaves = self._norm(n_partials), self._leaves(gains[index + 1])
            n_partials = feed_forward.append(program, index, norm, leaves)
        if with_logits:
            self._head(program, n_partials)
        return program

    def close_program(self, program: Program) -> None:
        """Append the dispatch that tells the host that everything before it ran."""
        program.mark("finish")
        finish(program, self.workspace.params, self.workspace.log)

    def _blocks(self) -> tuple[AttentionBlock, FeedForwardBlock]:
        spec, tuning, space = self.spec, self.tuning, self.workspace
        shape, split = self.attention_shape, self.attention_split
        return (
            AttentionBlock(spec, tuning, space, shape, split, self.weights.rope_table),
            FeedForwardBlock(spec, tuning, space, self.weights, self.misses),
        )

    def _head(self, program: Program, n_partials: int) -> None:
        space = self.workspace
        op, norm = OpContext(program, self.tuning), self._norm(n_partials)
        op.mark("head")
        matvec(op.named("logits"), (self.weights.output,), space.gained, space.logits, norm)
        candidates(
            op.named("candidates"),
            space.logits,
            self.spec.n_vocab,
            space.candidate_lists,
            space.candidates,
        )

    def _norm(self, n_partials: int) -> NormInput:
        return NormInput(
            self.workspace.norm_partials, n_partials, self.spec.width, self.spec.norm_eps
        )

    def _leaves(self, gain: int) -> NormOutput:
        space = self.workspace
        return NormOutput(space.hidden, space.gained, space.norm_partials, gain)
