"""This module describes what a token's computation works on besides weights and the KV cache.

A workspace only describes tensors, in shapes that follow from a model's description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vkmoe.batch import BatchKind, Phase
from vkmoe.facts import DeltaNetSpec, ExpertSpec, FeedForward, LatentSpec, Mixer, ModelSpec
from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.token_io import param_words
from vkmoe.kernels.attention.shapes import (
    AttentionShape,
    AttentionSplit,
    Shape,
    choose_split,
    shape_of,
)
from vkmoe.kernels.logits.operations import CANDIDATE_WORDS, list_words
from vkmoe.kernels.norms.operations import NormOutput
from vkmoe.kernels.prompt_attention.operations import PromptTiling, choose_tiling
from vkmoe.kernels.prompt_experts.operations import PairTiles, RoutedRows
from vkmoe.kernels.recurrent.operations import DeltaShape, DeltaSplit
from vkmoe.kernels.recurrent.operations import choose_split as choose_delta_split
from vkmoe.kernels.router.operations import RouterShape, RoutingLog, routing_words
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import row_parts
from vkmoe.models.kept import Kept, ring_of


@dataclass(frozen=True)
class AttentionKernels:
    """Says how a kind of attention runs: its shape, and how that is spread."""

    shape: Shape
    split: AttentionSplit
    tiling: PromptTiling

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Count the bytes of each cache that a layer has, for one sequence."""
        return self.shape.cache_bytes if self.shape.appends else ()

    @property
    def n_positions(self) -> int:
        """Count the positions that a sequence can have; 0: a layer has no caches of its own."""
        return self.shape.context if self.shape.appends else 0

    def of_context(self, n_positions: int) -> AttentionKernels:
        """Return the same with so many positions in its caches."""
        return replace(self, shape=replace(self.shape, context=n_positions))

    def pieces(self, cache: int, n_positions: int) -> Iterator[tuple[int, int]]:
        """Yield where a region of a cache holds its first positions: first byte, and bytes.

        Of a ring with fewer places it is all of it.
        """
        n_rows = min(n_positions, self.shape.n_places)
        for row_bytes, first in self._parts(cache) if n_positions else ():
            yield first, n_rows * row_bytes

    def last_pieces(self, cache: int, position: int) -> Iterator[tuple[int, int]]:
        """Yield where a region of a ring holds what its window sees before a position.

        Must hold: it is one.
        """
        n_places, n_rows = self.shape.n_places, min(position, self.shape.window - 1)
        begin = (position - n_rows) % n_places
        n_first = min(n_rows, n_places - begin)
        for row_bytes, first in self._parts(cache):
            for row, n in ((begin, n_first), (0, n_rows - n_first)):
                if n:
                    yield first + row * row_bytes, n * row_bytes

    def _parts(self, cache: int) -> Iterator[tuple[int, int]]:
        """Yield each part that rows of a KV head have: bytes of a row, and the first byte."""
        shape, first = self.shape, 0
        n_kv_heads = shape.n_kv_heads if isinstance(shape, AttentionShape) else 1
        for row_bytes in row_parts(shape.kv_types[cache], shape.row_dim):
            for _ in range(n_kv_heads):
                yield row_bytes, first
                first += shape.n_places * row_bytes


@dataclass(frozen=True)
class DeltaKernels:
    """Says how a gated delta rule runs: its shape, and how that is spread."""

    shape: DeltaShape
    split: DeltaSplit

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Count the bytes of what a layer keeps, for one sequence: the ring, and the states."""
        return self.shape.ring_bytes, self.shape.states_bytes

    @property
    def n_positions(self) -> int:
        """Return 0: what is kept does not grow with the positions."""
        return 0

    def of_context(self, n_positions: int) -> DeltaKernels:
        """Return the same: it does not depend on that."""
        return self

    def pieces(self, cache: int, n_positions: int) -> Iterator[tuple[int, int]]:
        """Yield all of a region: it holds for one position, which must be that of the copy."""
        yield 0, self.state_bytes[cache]

    def last_pieces(self, cache: int, position: int) -> Iterator[tuple[int, int]]:
        """Yield what holds before a position: rows that were projected last, or a state."""
        shape = self.shape
        if cache == 0:
            yield 0, shape.ring_bytes
            return
        version_bytes = shape.states_bytes // shape.n_versions
        yield (position - 1) % shape.n_versions * version_bytes, version_bytes


MixerKernels = AttentionKernels | DeltaKernels


@dataclass(frozen=True)
class RowSizes:
    """Lists how many rows programs have, rising: of tokens to decode, and of a prompt's chunk.

    A batch runs in the smallest program that takes it. No sizes: there are no such programs.
    """

    decode: tuple[int, ...] = (1,)
    prompt: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        return max((*self.decode, *self.prompt))


MOST_DECODED = 8  # rows of a batch
LOGIT_ROWS = (1, 2, 4, 8)  # of a prompt, that may want logits: sizes of programs


class LatentWorkspace:
    """Describes what latent attention needs besides: for its heads and for compressed queries.

    `qkv` of the workspace has q_down or the heads' q in front, then the compressed keys and values.
    """

    def __init__(self, kinds: Sequence[LatentSpec], n_rows: int) -> None:
        rank = max(kind.n_heads * kind.kv_rank for kind in kinds)
        self.absorbed = _rows("absorbed", rank, n_rows)
        self.mixed = _rows("mixed", rank, n_rows)
        self.q_normed = self.q = None
        if compressed := [kind for kind in kinds if kind.q_rank]:
            self.q_normed = _rows("q_normed", max(kind.q_rank for kind in compressed), n_rows)
            width = max(kind.n_heads * kind.query_dim for kind in compressed)
            self.q = _rows("q", width, n_rows)

    @property
    def tensors(self) -> list[TensorRef]:
        return [value for value in vars(self).values() if isinstance(value, TensorRef)]


class PromptWorkspace:
    """Describes what rows of prompts need besides: the tiles of their experts, and what those gave.

    A pair is one of the experts that a row chose: row * n_used + rank.
    """

    def __init__(
        self, spec: ModelSpec, tuning: Tuning, routing: TensorRef, params: TensorRef, n_rows: int
    ) -> None:
        self.routed = self.expert_out = self.shared_out = None
        if spec.experts is not None:
            routed = RoutedRows(routing, routing.row_words, router_shape(spec), params)
            self.routed = PairTiles(routed, tuning.tile.columns)
            self.expert_out = _rows("expert_out", spec.width * spec.experts.n_used, n_rows)
            if spec.experts.shared_width:
                self.shared_out = _rows("shared_out", spec.width, n_rows)

    @property
    def tensors(self) -> list[TensorRef]:
        pairs = self.routed
        found = (pairs.tiles, pairs.sorted_pairs, pairs.done, pairs.brought) if pairs else ()
        return [tensor for tensor in (*found, self.expert_out, self.shared_out) if tensor]


class InputWorkspace:
    """Describes what a token brings to all layers: inputs, and what is projected on the way there.

    Rows have a part for each layer. `gates` are those of one layer.
    """

    def __init__(self, spec: ModelSpec, n_rows: int) -> None:
        width, whole = spec.input_width, spec.n_layers * spec.input_width
        self.inputs = _rows("layer_inputs", whole, n_rows)
        self.projected = _rows("projected_inputs", whole, n_rows)
        self.gates = _rows("input_gates", width, n_rows)

    @property
    def tensors(self) -> list[TensorRef]:
        return [self.inputs, self.projected, self.gates]


class Workspace:
    """Describes the descriptor-bound tensors of a model, which all layers and programs share.

    A row of a tensor is as large as the layer needs it that needs most, and there are as many as
    the program has that has most.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tuning: Tuning,
        mixers: Mapping[Mixer, MixerKernels],
        sizes: RowSizes = RowSizes(),
        shares: bool = False,
    ) -> None:
        """Describe them; `shares`: another device computes experts, which takes one more."""
        n_rows = sizes.most
        n_logits = max(n for n in LOGIT_ROWS if n <= max(n_rows, 1))
        # One partial per workgroup of whichever producer has most.
        width = spec.width
        n_partials = max(-(-width // tuning.fewest_rows), -(-width // (32 * tuning.workgroup_size)))
        self.mixers = mixers
        self.row_sizes: dict[Phase, tuple[int, ...]] = {
            "decode": sizes.decode,
            "prompt": sizes.prompt,
        }
        self.params = TensorRef("params", param_words(n_rows))
        self.hidden = _rows("hidden", width, n_rows)
        self.gained = _rows("gained", width, n_rows)
        self.norm_partials = _rows("norm_partials", n_partials, n_rows)
        # The states that are read to guess tokens ahead.
        guesses = spec.ahead is not None or spec.drafter is not None
        self.states = _rows("states", spec.width, n_rows) if guesses else None
        self._describe_norms(spec, n_rows)
        self._describe_attention(spec, sizes)
        self._describe_feed_forward(spec, n_rows, shares)
        self.inputs = InputWorkspace(spec, n_rows) if spec.input_width else None
        self.prompt = None
        if sizes.prompt:
            self.prompt = PromptWorkspace(spec, tuning, self.routing, self.params, n_rows)
        self.logits = _rows("logits", spec.n_vocab, n_logits)
        self.candidate_lists = _rows("candidate_lists", list_words(tuning, spec.n_vocab), n_logits)
        self.candidates = _rows("candidates", CANDIDATE_WORDS, n_logits)
        n_used = spec.experts.n_used if spec.experts else 1
        self._log = RoutingLog(len(spec.moe_layers), n_used, n_rows)
        self.log = self._log.tensor

    def _describe_norms(self, spec: ModelSpec, n_rows: int) -> None:
        """Describe what blocks give where that is normed first, and what routers read there."""
        self.block_out = self.beside_out = self.router_in = None
        if any(layer.post_norms for layer in spec.kept_layers):
            self.block_out = _rows("block_out", spec.width, n_rows)
        if spec.experts is not None and spec.experts.beside_width:
            self.beside_out = _rows("beside_out", spec.width, n_rows)
            self.router_in = _rows("router_in", spec.width, n_rows)

    def _describe_attention(self, spec: ModelSpec, sizes: RowSizes) -> None:
        n_rows, latents = sizes.most, [x for x in spec.mixers if isinstance(x, LatentSpec)]
        kinds = self.mixers.values()
        attention = [item for item in kinds if isinstance(item, AttentionKernels)]
        n_words = max((x.split.partials_words(x.shape) for x in attention), default=4)
        mixed = [x.shape.mixed_words for x in kinds if isinstance(x, DeltaKernels)]
        self.mixed = _rows("mixed", max(mixed), n_rows) if mixed else None
        grouped = [x.shape for x in attention if isinstance(x.shape, AttentionShape)]
        widths = [kind.qkv_width for kind in (*spec.mixers, *grouped)]  # these: with k and v anyway
        self.qkv = _rows("qkv", max(widths), n_rows)
        self.latent = LatentWorkspace(latents, n_rows) if latents else None
        self.attention_partials = _rows("attention_partials", n_words, sizes.decode[-1])
        width = max(mixer.attended_width for mixer in spec.mixers)
        self.attended = _rows("attended", width, n_rows)

    def _describe_feed_forward(self, spec: ModelSpec, n_rows: int, shares: bool) -> None:
        router = router_shape(spec) if spec.experts else None
        self.router_logits = _rows("router_logits", router.n_logits if router else 1, n_rows)
        self.routing = _rows("routing", routing_words(router) if router else 4, n_rows)
        width = max(_act_words(layer.feed_forward) for layer in spec.kept_layers)
        self.act = _rows("act", width, n_rows)
        # Rows that go to another device, and what comes back.
        self.exchanged = _rows("exchanged", spec.width, n_rows) if shares else None
        experts = spec.experts
        shared_width = max(experts.shared_width, experts.beside_width) if experts else 0
        self.shared_act = _rows("shared_act", shared_width, n_rows) if shared_width else None

    def block_output(self, gain: int) -> NormOutput:
        """Return where a block leaves what it gives, if that is normed before it is added.

        Kernels that add to a state leave it gained, too, by any `gain`: no kernel reads that.
        """
        assert self.block_out is not None
        return NormOutput(self.block_out, self.gained, self.norm_partials, gain, adds=False)

    def batch_kind(self, phase: Phase, n_rows: int, n_logits: int) -> BatchKind:
        """Choose the smallest program that takes so many rows, of which some want logits.

        Must hold: they are no more than the largest has.
        """
        sizes = self.row_sizes[phase]
        heads = sizes if phase == "decode" else LOGIT_ROWS
        size = next(size for size in sizes if size >= n_rows)
        return BatchKind(phase, size, next(n for n in (0, *heads) if n >= n_logits))

    def routing_log(self, n_rows: int) -> RoutingLog:
        """Lay out the log of a program with so many rows."""
        return replace(self._log, n_tokens=n_rows, room=self.log.n_words)

    @property
    def brings_experts(self) -> bool:
        """Say whether experts of some program may have several tiles, so that it brings them."""
        routed = self.prompt.routed if self.prompt else None
        return routed is not None and self.row_sizes["prompt"][-1] > routed.columns

    @property
    def attention_text(self) -> str:
        """Say whether attention of prompts runs on matrix units, for people."""
        kinds = [kind for kind in self.mixers.values() if isinstance(kind, AttentionKernels)]
        n_there = sum(kind.tiling.suffix == "+matrix" for kind in kinds)
        of_some = "of some layers " if 0 < n_there < len(kinds) else ""
        return f"{of_some}on matrix units too" if n_there else "not on matrix units"

    @property
    def tensors(self) -> list[TensorRef]:
        own = [value for value in vars(self).values() if isinstance(value, TensorRef)]
        parts = [part for part in (self.latent, self.prompt, self.inputs) if part is not None]
        return own + [tensor for part in parts for tensor in part.tensors]


def _rows(name: str, row_words: int, n_rows: int) -> TensorRef:
    """Describe a tensor of rows of at least so many words, which begin at whole vec4s."""
    return TensorRef(name, -(-row_words // 4) * 4 * n_rows, n_rows)


def _act_words(block: FeedForward) -> int:
    """Count the words of `act`: those of all used experts, or of the one block there is."""
    return block.width * (block.n_used if isinstance(block, ExpertSpec) else 1)


def mixer_kernels(spec: ModelSpec, kept: Kept, tuning: Tuning) -> dict[Mixer, MixerKernels]:
    """Say how each kind of mixer runs, with caches for what is kept."""
    kernels: dict[Mixer, MixerKernels] = {}
    for mixer in spec.mixers:
        if isinstance(mixer, DeltaNetSpec):
            delta = DeltaShape.of(mixer, kept.n_versions)
            kernels[mixer] = DeltaKernels(delta, choose_delta_split(delta, tuning))
            continue
        ring = ring_of(mixer, kept.margin)
        shape = shape_of(mixer, kept.n_positions, kept.kv_types, spec.norm_eps, ring)
        kernels[mixer] = AttentionKernels(
            shape, choose_split(shape, tuning), choose_tiling(shape, tuning)
        )
    return kernels


def router_shape(spec: ModelSpec) -> RouterShape:
    """Describe how the layers of a model with experts route."""
    experts = spec.experts
    assert experts is not None, spec.name
    return RouterShape.of(experts)
