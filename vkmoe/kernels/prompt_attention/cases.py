"""Compares append_rows, append_latent_rows and prompt_attention with their twins, batch by batch.

Rows of a cache that were never written are poisoned, and so are the inert rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.facts import AttentionSpec, LatentSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.attention import twins
from vkmoe.kernels.attention.caches import hadamard
from vkmoe.kernels.attention.cases import (
    CACHES,
    OTHER_SHAPES,
    attention_text,
    deepseek2_shape,
    gemma4_shape,
    gpt_oss_shape,
    has_usual_caches,
    qwen3_shape,
    seen_bytes,
    shapes_of,
    shortened,
)
from vkmoe.kernels.attention.layers import GivenRows, layer_of
from vkmoe.kernels.attention.shapes import AttentionShape, LatentShape, Shape
from vkmoe.kernels.comparison import Checks, Inputs, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work
from vkmoe.kernels.prompt_attention.operations import PromptTensors, choose_tiling
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KV_NUMBERS

Floats = NDArray[np.floating]
Singles = NDArray[np.float32]
NOTHING = slice(0)
GAP = 8  # words of something else behind a row of a tensor, and in front of what is in it
N_REGIONS = 2
SHARE = 2e-5  # of the largest value: what sums in f32 may differ by


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


class Prompts:
    """Runs batches over caches on the device, and keeps what they append in copies of the caches.

    The program has `n_rows` rows; its batches have as many or fewer. Positions `filled` of all
    regions are random at first. `sinks` [n_heads] are in place of random ones, where there are any.
    """

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        tuning: Tuning,
        n_rows: int,
        filled: slice = NOTHING,
        sinks: Singles | None = None,
    ) -> None:
        self._runner, self._shape, self._n_rows = runner, shape, n_rows
        given = GivenRows(n_rows, N_REGIONS, before_q=GAP, before_kv=GAP, behind=GAP)
        self._layer = layer_of(runner, shape, filled, given, sinks)
        self.caches, self._program = self._layer.caches, Program("prompt attention")
        self._params = TensorRef(f"params of {n_rows}", param_words(n_rows))
        self._out = given.tensor("out", shape.n_heads * shape.value_dim)
        op = OpContext(self._program, tuning, "prompt", n_rows=n_rows)
        tensors = PromptTensors(self._params, self._out)
        tiling = choose_tiling(shape, tuning)
        self._on_units = tiling.subgroup_size > 0
        self._layer.append_prompt(op, tiling, tensors)

    def draw(self, positions: Sequence[int], sequences: Sequence[int] = ()) -> PromptBatch:
        """Draw random rows at some positions; without sequences all are of region 0."""
        raw = self._layer.draw(len(positions))
        return PromptBatch(positions, sequences or [0] * len(positions), raw)

    def outputs(self, batch: PromptBatch) -> Singles:
        """Run a batch and compare nothing; returns [n_rows, n_heads * value_dim]."""
        (out,) = self._runner.run(self._program, self._inputs(batch), self._out)
        return self._split(out, len(batch.raw))[0]

    def step(self, batch: PromptBatch, checks: Checks) -> Singles:
        """Run a batch, check all it left behind, keep what it appended; returns as `outputs`."""
        which, is_turned = self._layer.turned
        queries = self._layer.tensors[which]
        turned, out = self._runner.run(self._program, self._inputs(batch), queries, self._out)
        rows = zip(batch.raw, batch.positions, strict=True)
        appended = [self._layer.twin(raw, position) for raw, position in rows]
        given = self._layer.inputs(batch.raw)[queries]
        wanted = np.array([twin.queries for twin in appended])
        self._compare_queries(checks, turned, given, is_turned, wanted)
        regions = zip(batch.sequences, batch.positions, strict=True)
        self._layer.compare(checks, list(regions), [one.cached for one in appended])
        left, untouched = self._split(out, len(batch.raw))
        checks.untouched("words beyond the rows of out", untouched)
        keys, values = (cached[list(batch.sequences)] for cached in self._layer.rows())
        window, sinks = self._shape.window, self._layer.sinks
        attended = twins.prompt_attention(
            self._shape.scale * wanted, keys, values, batch.positions, window, sinks
        )
        attended = hadamard(attended, self._shape.hadamard_blocks[1])
        largest = float(np.nanmax(np.abs(values.astype(np.float64))))
        sizes = np.full(attended.shape, largest)
        if self._on_units:
            bound = twins.prompt_matrix_bound(
                self._shape.scale * wanted, keys, values, batch.positions, window
            )
            # What a transform makes of errors that are all alike.
            spread = max(1, self._shape.hadamard_blocks[1]) ** 0.5
            sizes += spread / SHARE * bound[..., None]
        checks.close("out", left, attended.reshape(left.shape), sizes.reshape(left.shape), SHARE)
        return left

    def _inputs(self, batch: PromptBatch) -> Inputs:
        return {**self._layer.inputs(batch.raw), self._params: batch.params(self._n_rows)}

    def _split(self, out: Words, n_rows: int) -> tuple[Singles, Words]:
        """Split the words of `out` into what a batch leaves and what it must not touch."""
        words, width = out.reshape(self._n_rows, -1), self._out.row_words - GAP
        left = np.ascontiguousarray(words[:n_rows, :width]).view(np.float32)
        return left, np.concatenate([words[:n_rows, width:].ravel(), words[n_rows:].ravel()])

    def _compare_queries(
        self,
        checks: Checks,
        words: Words,
        given: Singles,
        is_turned: NDArray[np.bool_],
        wanted: Floats,
    ) -> None:
        """Compare the words of a tensor in which queries were turned; the last dims of each."""
        n_rows, found = len(given), words.reshape(self._n_rows, -1)
        before = np.ascontiguousarray(given).view(np.uint32)
        checks.equal("words beside the queries", found[:n_rows, ~is_turned], before[:, ~is_turned])
        checks.untouched("queries of inert rows", found[n_rows:])
        n_dims = np.count_nonzero(is_turned) // self._shape.n_heads
        turned = wanted[..., wanted.shape[2] - n_dims :].reshape(n_rows, -1)
        left = np.ascontiguousarray(found[:n_rows, is_turned]).view(np.float32)
        checks.close("turned queries", left, turned, 0.2 + np.abs(turned))


# ----- what is compared -----


PROMPT_ROWS = 40


def _prompts(setting: Setting) -> Iterator[Trial]:
    """Compare chunks of two prompts; then in windows, with sinks, normed values, over the caches of
    another layer, and wide heads."""
    for what, shapes in _shapes().items():
        yield Trial(what, [partial(_chunks, setting, shape) for shape in shapes])


def _shapes() -> dict[str, list[AttentionShape]]:
    makers = qwen3_shape, gpt_oss_shape, gemma4_shape
    shapes = {str(types): [make(kv_types=types) for make in makers] for types in CACHES}
    for kv_types in CACHES:
        shapes[str(kv_types)].append(gemma4_shape(kv_types=kv_types, appends=False))
    return shapes | {f"{one.kv_types}, {one.head_dim} dims": [one] for one in OTHER_SHAPES}


def _latent_prompts(setting: Setting) -> Iterator[Trial]:
    for what, shape in _latent_shapes().items():
        yield Trial(what, [partial(_chunks, setting, shape)])


def _latent_shapes() -> dict[str, LatentShape]:
    return {f"{kind} of latent rows": deepseek2_shape(kv_type=kind) for kind in KV_NUMBERS}


def _prompt_attention(setting: Setting) -> Iterator[Trial]:
    """Compare what this variant is chosen for: matrix units do not take all."""
    tuning = setting.tuning
    latent = {what: [shape] for what, shape in _latent_shapes().items()}
    given: dict[str, Sequence[Shape]] = {**_shapes(), **latent}
    for what, shapes in given.items():
        chosen = [s for s in shapes if choose_tiling(s, tuning).suffix == tuning.attend_suffix]
        if chosen:
            yield Trial(what, [partial(_chunks, setting, shape) for shape in chosen])


def _chunks(setting: Setting, shape: Shape, runner: Runner) -> Checks:
    """Compare a prompt in chunks, with rows of another beside it."""
    filled = NOTHING if shape.appends else slice(None)
    case, checks = Prompts(runner, shape, setting.tuning, PROMPT_ROWS, filled), Checks()
    for chunk in (range(PROMPT_ROWS), range(PROMPT_ROWS, 2 * PROMPT_ROWS)):
        case.step(case.draw(chunk), checks)
    case.step(case.draw([2 * PROMPT_ROWS, 0, 1, 2], [0, 1, 1, 1]), checks)
    return checks


# ----- what a model uses -----


@dataclass(frozen=True)
class PromptProbe:
    """Checks rows of two prompts at the end of a context."""

    shape: Shape
    tuning: Tuning

    def run(self, runner: Runner) -> Checks:
        """Compare them in one batch."""
        first = max(0, self.shape.context - PROMPT_ROWS)
        rows = range(first, min(first + 24, self.shape.context))
        filled = slice(first) if self.shape.appends else slice(None)
        case, checks = Prompts(runner, self.shape, self.tuning, PROMPT_ROWS, filled), Checks()
        positions = [*rows, *rows[:8]]
        case.step(case.draw(positions, [0] * len(rows) + [1] * len(rows[:8])), checks)
        return checks


def _prompts_probe(used: Used) -> PromptProbe:
    """Compare what appends rows and what attends, which follow each other."""
    return PromptProbe(shortened(used.mixer.shape), used.tuning)


# ----- what is measured -----


ATTENTION_ROWS = 128


def _prompts_works(setup: Setup) -> Iterator[Work]:
    """Take the last rows of a full cache as a prompt; keys and values are read once for all."""
    family = setup.variant.family
    kinds = {"append_rows": AttentionSpec, "append_latent_rows": LatentSpec}
    for shape in shapes_of(setup, kinds.get(family)):
        n_words, n_bytes = _row_words(shape, appends=family in kinds), 0
        if family not in kinds:
            n_bytes = seen_bytes(shape, ATTENTION_ROWS)
        text = f"{ATTENTION_ROWS} rows, {attention_text(shape)}"
        check = partial(_at_the_end, shape, setup.tuning)
        n_bytes += 4 * ATTENTION_ROWS * n_words
        yield Work(text, n_bytes, check, is_usual=has_usual_caches(shape))


def _row_words(shape: Shape, appends: bool) -> int:
    """Count the words of a row that are read or written beside the cache."""
    if isinstance(shape, AttentionShape):
        return 2 * (shape.qkv_width if appends else shape.n_heads * shape.head_dim)
    if appends:
        return 2 * (shape.n_heads * shape.rope_dim + shape.row_dim)
    return shape.n_heads * (2 * shape.kv_rank + shape.rope_dim)


def _at_the_end(shape: Shape, tuning: Tuning, runner: Runner) -> Checks:
    """Compare the last rows of a full cache."""
    n_rows, checks = min(ATTENTION_ROWS, shape.context), Checks()
    first = shape.context - n_rows
    case = Prompts(runner, shape, tuning, n_rows, slice(first))
    case.step(case.draw(range(first, shape.context)), checks)
    return checks


FAMILIES = {
    "append_rows": Family(_prompts, _prompts_works, "walk_suffix", _prompts_probe),
    "append_latent_rows": Family(_latent_prompts, _prompts_works, "walk_suffix", _prompts_probe),
    "prompt_attention": Family(_prompt_attention, _prompts_works, "attend_suffix", _prompts_probe),
}
