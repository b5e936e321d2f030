"""Compares append_rows, append_latent_rows and prompt_attention with their twins, batch by batch.

Rows of a cache that were never written are poisoned, and so are the inert rows of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.attention.cases import (
    CACHES,
    attention_text,
    deepseek2_shape,
    gpt_oss_shape,
    grouped_shapes,
    has_usual_caches,
    latent_shapes,
    qwen3_shape,
)
from vkmoe.kernels.attention.layers import GroupedLayer, LatentLayer, Layer
from vkmoe.kernels.attention.operations import LatentQkv
from vkmoe.kernels.attention.shapes import AttentionShape, LatentShape
from vkmoe.kernels.comparison import Checks, Inputs, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Work
from vkmoe.kernels.prompt_attention import twins
from vkmoe.kernels.prompt_attention.operations import (
    PromptTensors,
    append_latent_rows,
    append_rows,
    choose_tiling,
    latent_prompt_attention,
    prompt_attention,
)
from vkmoe.kernels.shapes import TINY
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KV_NUMBERS

__all__ = ["FAMILIES", "GroupedPrompts", "LatentPrompts", "PromptBatch", "Prompts", "prompts"]

Floats = NDArray[np.floating]
Singles = NDArray[np.float32]
NOTHING = slice(0)
GAP = 8  # words of something else behind a row of a tensor, and in front of what is in it


class PromptBatch(NamedTuple):
    """Holds rows of prompts: where they stand, and all that a kernel is given of them."""

    positions: Sequence[int]
    sequences: Sequence[int]
    raw: Singles  # [n_rows, raw_words]

    def part(self, rows: Sequence[int] | range) -> PromptBatch:
        """Return some of the rows, in an order of their own."""
        places = [(self.positions[row], self.sequences[row]) for row in rows]
        positions, sequences = zip(*places, strict=True)
        return PromptBatch(positions, sequences, self.raw[list(rows)])

    def params(self, n_rows: int) -> Words:
        """Make the parameters of a program that has `n_rows` rows."""
        words, unused = np.zeros(param_words(n_rows), np.uint32), (0,) * len(self.positions)
        positions, sequences = tuple(self.positions), tuple(self.sequences)
        batch = TokenBatch(unused, positions, sequences, (False,) * len(unused), "prompt")
        pack_params(words.data, batch, 0, 0)
        return words


class Prompts(ABC):
    """Runs batches over caches on the device, and keeps what they append in copies of the caches.

    The program has `n_rows` rows; its batches have as many or fewer.
    """

    n_regions = 2

    def __init__(
        self,
        runner: Runner,
        layer: Layer,
        shape: AttentionShape | LatentShape,
        tuning: Tuning,
        n_rows: int,
    ) -> None:
        self._runner, self._layer, self._shape, self._n_rows = runner, layer, shape, n_rows
        self._tiling, self.caches = choose_tiling(shape, tuning), layer.caches
        self._program = Program("prompt attention")
        self._op = OpContext(self._program, tuning, "prompt", n_rows=n_rows)
        self._params = TensorRef(f"params of {n_rows}", param_words(n_rows))
        self._out = self._rows("out", shape.n_heads * shape.value_dim + GAP)
        self._tensors = PromptTensors(self._params, self._out)

    @property
    @abstractmethod
    def _turned(self) -> tuple[TensorRef, slice]:
        """Return the tensor whose queries are turned in place, and its words in a batch's raw."""

    @property
    @abstractmethod
    def _is_turned(self) -> NDArray[np.bool_]:
        """Mark the words of a row of that tensor that are turned."""

    @abstractmethod
    def _inputs(self, raw: Singles) -> Inputs:
        """Name the tensors of some rows."""

    @abstractmethod
    def _append_twin(self, raw: Singles, position: int) -> twins.Appended:
        """Compute what a row leaves."""

    @abstractmethod
    def _queries(self, raw: Singles, appended: twins.Appended) -> Floats:
        """Return a row's queries [n_heads, row_dim], not scaled."""

    def draw(self, positions: Sequence[int], sequences: Sequence[int] = ()) -> PromptBatch:
        """Draw random rows at some positions; without sequences all are of region 0."""
        n_words = sum(ref.row_words for ref in self._inputs(np.zeros((1, 0), np.float32)))
        raw = self._layer.rng.normal(0, 1, (len(positions), n_words)).astype(np.float32)
        return PromptBatch(positions, sequences or [0] * len(positions), raw)

    def outputs(self, batch: PromptBatch) -> Singles:
        """Run a batch and compare nothing; returns [n_rows, n_heads * value_dim]."""
        inputs = {**self._inputs(batch.raw), self._params: batch.params(self._n_rows)}
        (out,) = self._runner.run(self._program, inputs, self._out)
        return self._split(out, len(batch.raw))[0]

    def step(self, batch: PromptBatch, checks: Checks) -> Singles:
        """Run a batch, check all it left behind, keep what it appended; returns as `outputs`."""
        inputs = {**self._inputs(batch.raw), self._params: batch.params(self._n_rows)}
        turned, out = self._runner.run(self._program, inputs, self._turned[0], self._out)
        rows = zip(batch.raw, batch.positions, strict=True)
        appended = [self._append_twin(raw, position) for raw, position in rows]
        self._compare_queries(checks, turned, batch, appended)
        regions = zip(batch.sequences, batch.positions, strict=True)
        places = [(sequence, slice(None), position) for sequence, position in regions]
        self._layer.compare(checks, self._layer.left(), places, [one.cached for one in appended])
        left, untouched = self._split(out, len(batch.raw))
        checks.untouched("words beyond the rows of out", untouched)
        wanted, largest = self._out_twin(batch, appended)
        checks.close("out", left, wanted.reshape(left.shape), largest, 2e-5)
        return left

    def _rows(self, name: str, row_words: int) -> TensorRef:
        return TensorRef(f"{name} of {self._n_rows}", self._n_rows * row_words, self._n_rows)

    def _split(self, out: Words, n_rows: int) -> tuple[Singles, Words]:
        """Split the words of `out` into what a batch leaves and what it must not touch."""
        words, width = out.reshape(self._n_rows, -1), self._out.row_words - GAP
        left = np.ascontiguousarray(words[:n_rows, :width]).view(np.float32)
        return left, np.concatenate([words[:n_rows, width:].ravel(), words[n_rows:].ravel()])

    def _compare_queries(
        self, checks: Checks, words: Words, batch: PromptBatch, appended: Sequence[twins.Appended]
    ) -> None:
        n_rows, is_turned = len(batch.raw), self._is_turned
        found = words.reshape(self._n_rows, -1)
        given = np.ascontiguousarray(batch.raw[:, self._turned[1]]).view(np.uint32)
        checks.equal("words beside the queries", found[:n_rows, ~is_turned], given[:, ~is_turned])
        checks.untouched("queries of inert rows", found[n_rows:])
        wanted = np.array([twin.queries.ravel() for twin in appended])
        left = np.ascontiguousarray(found[:n_rows, is_turned]).view(np.float32)
        checks.close("turned queries", left, wanted, 0.2 + np.abs(wanted))

    def _out_twin(
        self, batch: PromptBatch, appended: Sequence[twins.Appended]
    ) -> tuple[Floats, float]:
        """Compute the outputs over the rows that were appended, and the largest value seen."""
        rows = zip(batch.raw, appended, strict=True)
        queries = self._shape.scale * np.array([self._queries(*row) for row in rows])
        all_keys, all_values = self.caches[0].rows.values(), self.caches[-1].rows.values()
        keys = [all_keys[sequence] for sequence in batch.sequences]
        width = self._shape.value_dim
        values = [all_values[sequence][..., :width] for sequence in batch.sequences]
        sinks, window = self._layer.sinks, self._shape.window
        wanted = twins.prompt_attention(queries, keys, values, batch.positions, window, sinks)
        return wanted, float(np.nanmax(np.abs(np.array(values).astype(np.float64))))


class GroupedPrompts(Prompts):
    """Checks prompts of grouped heads; positions `filled` of all regions are random at first."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        tuning: Tuning,
        n_rows: int,
        filled: slice = NOTHING,
        sinks: Singles | None = None,
    ) -> None:
        """Fill the caches; `sinks` [n_heads] in place of random ones, where the shape has sinks."""
        self._drawn = GroupedLayer(runner, shape, filled, self.n_regions, sinks)
        super().__init__(runner, self._drawn, shape, tuning, n_rows)
        self.shape, cache = shape, self._drawn.cache
        self._qkv = self._rows("qkv", shape.qkv_width + GAP)
        append_rows(self._op, shape, cache, self._qkv, self._params)
        prompt_attention(self._op, shape, self._tiling, cache, self._qkv, self._tensors)

    @property
    def _turned(self) -> tuple[TensorRef, slice]:
        return self._qkv, slice(None)

    @property
    def _is_turned(self) -> NDArray[np.bool_]:
        return np.arange(self._qkv.row_words) < self.shape.n_heads * self.shape.head_dim

    def _inputs(self, raw: Singles) -> Inputs:
        return {self._qkv: raw}

    def _append_twin(self, raw: Singles, position: int) -> twins.Appended:
        return twins.append_row(self._drawn.inputs(raw), position)

    def _queries(self, raw: Singles, appended: twins.Appended) -> Floats:
        return appended.queries


class LatentPrompts(Prompts):
    """Checks prompts of latent attention; positions `filled` of all regions are random at first."""

    def __init__(
        self,
        runner: Runner,
        shape: LatentShape,
        tuning: Tuning,
        n_rows: int,
        filled: slice = NOTHING,
    ) -> None:
        self._drawn = LatentLayer(runner, shape, filled, self.n_regions)
        super().__init__(runner, self._drawn, shape, tuning, n_rows)
        self.shape, cache = shape, self._drawn.cache
        self._absorbed = self._rows("absorbed", shape.n_heads * shape.kv_rank + GAP)
        # One tensor for q and kv, as where one matrix product makes both.
        self._kv_offset = GAP + shape.q_width + GAP
        self._raw = self._rows("q_kv", self._kv_offset + shape.row_dim)
        qkv = LatentQkv(self._absorbed, self._raw, self._raw, GAP, self._kv_offset)
        append_latent_rows(self._op, shape, cache, qkv, self._params)
        latent_prompt_attention(self._op, shape, self._tiling, cache, qkv, self._tensors)

    @property
    def _turned(self) -> tuple[TensorRef, slice]:
        return self._raw, slice(self._absorbed.row_words, None)

    @property
    def _is_turned(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._raw.row_words, np.bool_)
        q = mask[GAP : GAP + self.shape.q_width].reshape(self.shape.n_heads, -1)
        q[:, self.shape.nope_dim :] = True
        return mask

    def _inputs(self, raw: Singles) -> Inputs:
        absorbed, rest = np.split(raw, [self._absorbed.row_words], axis=1)
        return {self._absorbed: absorbed, self._raw: rest}

    def _append_twin(self, raw: Singles, position: int) -> twins.Appended:
        rest = raw[self._absorbed.row_words :]
        q = rest[GAP : GAP + self.shape.q_width]
        inputs = self._drawn.inputs(self._absorbed_of(raw), q, rest[self._kv_offset :])
        return twins.append_latent_row(inputs, position)

    def _queries(self, raw: Singles, appended: twins.Appended) -> Floats:
        return np.hstack([self._absorbed_of(raw), appended.queries])

    def _absorbed_of(self, raw: Singles) -> Singles:
        return raw[: self.shape.n_heads * self.shape.kv_rank].reshape(self.shape.n_heads, -1)


def prompts(
    runner: Runner,
    shape: AttentionShape | LatentShape,
    tuning: Tuning,
    n_rows: int,
    filled: slice = NOTHING,
) -> Prompts:
    """Make the case of a shape's kind."""
    if isinstance(shape, LatentShape):
        return LatentPrompts(runner, shape, tuning, n_rows, filled)
    return GroupedPrompts(runner, shape, tuning, n_rows, filled)


# ----- what is compared -----


PROMPT_ROWS = 40


def _prompts(setting: Setting) -> Iterator[Trial]:
    """Compare chunks of two prompts; then with a window and sinks."""
    for kv_types in CACHES:
        shapes = qwen3_shape(kv_types=kv_types), gpt_oss_shape(kv_types=kv_types)
        yield Trial(str(kv_types), [partial(_chunks, setting, shape) for shape in shapes])


def _latent_prompts(setting: Setting) -> Iterator[Trial]:
    for kv_type in KV_NUMBERS:
        shape = deepseek2_shape(kv_type=kv_type)
        yield Trial(f"{kv_type} of latent rows", [partial(_chunks, setting, shape)])


def _prompt_attention(setting: Setting) -> Iterator[Trial]:
    yield from _prompts(setting)
    yield from _latent_prompts(setting)


def _chunks(setting: Setting, shape: AttentionShape | LatentShape, runner: Runner) -> Checks:
    """Compare a prompt in chunks, with rows of another beside it."""
    case, checks = prompts(runner, shape, setting.tuning, PROMPT_ROWS), Checks()
    for chunk in (range(PROMPT_ROWS), range(PROMPT_ROWS, 2 * PROMPT_ROWS)):
        case.step(case.draw(chunk), checks)
    case.step(case.draw([2 * PROMPT_ROWS, 0, 1, 2], [0, 1, 1, 1]), checks)
    return checks


# ----- what is measured -----


ATTENTION_ROWS = 128


def _grouped_prompts_works(setup: Setup) -> Iterator[Work]:
    """Take the last rows of a full cache as a prompt; keys and values are read once for all."""
    if setup.shapes.latent is None or setup.shapes is TINY:
        for shape in grouped_shapes(setup):
            n_words = 2 * ATTENTION_ROWS * shape.n_heads * shape.head_dim
            n_seen = min(
                shape.context, shape.window + ATTENTION_ROWS if shape.window else shape.context
            )
            n_bytes = sum(shape.cache_bytes) // shape.context * n_seen
            if setup.variant.family == "append_rows":
                n_words, n_bytes = 2 * ATTENTION_ROWS * shape.qkv_width, 0
            yield _prompt_work(setup, shape, 4 * n_words + n_bytes)


def _latent_prompts_works(setup: Setup) -> Iterator[Work]:
    for shape in latent_shapes(setup):
        n_words = ATTENTION_ROWS * shape.n_heads * (2 * shape.kv_rank + shape.rope_dim)
        n_bytes = sum(shape.cache_bytes)
        if setup.variant.family == "append_latent_rows":
            rotary = 2 * shape.n_heads * shape.rope_dim
            n_words, n_bytes = ATTENTION_ROWS * (rotary + 2 * shape.row_dim), 0
        yield _prompt_work(setup, shape, 4 * n_words + n_bytes)


def _prompt_attention_works(setup: Setup) -> Iterator[Work]:
    yield from _grouped_prompts_works(setup)
    yield from _latent_prompts_works(setup)


def _prompt_work(setup: Setup, shape: AttentionShape | LatentShape, n_bytes: int) -> Work:
    def check(runner: Runner) -> Checks:
        first, checks = shape.context - ATTENTION_ROWS, Checks()
        case = prompts(runner, shape, setup.tuning, ATTENTION_ROWS, slice(first))
        case.step(case.draw(range(first, shape.context)), checks)
        return checks

    text = f"{ATTENTION_ROWS} rows, {attention_text(shape)}"
    return Work(text, n_bytes, check, is_usual=has_usual_caches(shape))


FAMILIES = {
    "append_rows": Family(_prompts, _grouped_prompts_works, "walk_suffix"),
    "append_latent_rows": Family(_latent_prompts, _latent_prompts_works, "walk_suffix"),
    "prompt_attention": Family(_prompt_attention, _prompt_attention_works, "walk_suffix"),
}
