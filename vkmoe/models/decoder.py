"""Builds the forward pass of one token as a program, from parts that all architectures share.

A layer is a list of parts: attention (attention.py), then feed-forward (feed_forward.py). The norms
are fused: a producer of `hidden` leaves `gained` = hidden * gain of the next norm and partial sums
of squares, and its consumer multiplies its dot products by the norm's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.models.attention import MIXERS
from vkmoe.models.feed_forward import FeedForwardBlock, MissService
from vkmoe.models.weights import ModelWeights
from vkmoe.models.workspace import KvAddresses, Workspace
from vkmoe.ops.candidates import candidates
from vkmoe.ops.embed import embed
from vkmoe.ops.finish import finish
from vkmoe.ops.matvec import matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.tuning import Tuning

__all__ = ["Decoder"]


class _Append(Protocol):
    """Appends a part to a program, and returns the number of partials it leaves."""

    def __call__(self, program: Program, *, norm: NormInput, leaves: NormOutput) -> int: ...


class _Part(NamedTuple):
    """Describes a part of a layer, with the gain of the norm before it."""

    gain: int
    append: _Append


@dataclass(frozen=True)
class Decoder:
    """Builds the programs of a model. `misses` is None where no expert ever moves."""

    spec: ModelSpec
    tuning: Tuning
    weights: ModelWeights
    workspace: Workspace
    caches: tuple[KvAddresses, ...]
    misses: MissService | None = None

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
        n_partials = embed(
            program,
            self.tuning,
            self.weights.embeddings,
            space.params,
            self._leaves(gains[0]),
            "embed",
        )
        for part, next_gain in zip(parts, gains[1:], strict=True):
            norm, leaves = self._norm(n_partials), self._leaves(next_gain)
            n_partials = part.append(program, norm=norm, leaves=leaves)
        if with_logits:
            self._head(program, n_partials)
        return program

    def close_program(self, program: Program) -> None:
        """Append the dispatch that tells the host that everything before it ran."""
        finish(program, self.workspace.params, self.workspace.log)

    def _parts(self) -> Iterator[_Part]:
        """List what adds to the hidden state, in order: the parts of one layer after another."""
        spec, tuning, space = self.spec, self.tuning, self.workspace
        feed_forward = FeedForwardBlock(spec, tuning, space, self.weights, self.misses)
        for index, layer in enumerate(self.weights.layers):
            block = MIXERS[type(spec.layers[index].mixer)]
            mixer = block(spec, tuning, space, index, layer, self.caches[index])
            yield _Part(layer.mixer.gain, mixer.append)
            yield _Part(layer.feed_forward.gain, partial(feed_forward.append, index=index))

    def _head(self, program: Program, n_partials: int) -> None:
        space = self.workspace
        matvec(
            program,
            self.tuning,
            (self.weights.output,),
            space.gained,
            space.logits,
            "logits",
            self._norm(n_partials),
        )
        candidates(
            program,
            self.tuning,
            space.logits,
            self.spec.n_vocab,
            space.candidate_lists,
            space.candidates,
            "candidates",
        )

    def _norm(self, n_partials: int) -> NormInput:
        return NormInput(
            self.workspace.norm_partials, n_partials, self.spec.width, self.spec.norm_eps
        )

    def _leaves(self, gain: int) -> NormOutput:
        space = self.workspace
        return NormOutput(space.hidden, space.gained, space.norm_partials, gain)
