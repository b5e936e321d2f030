"""Attention of prompts: against the twins, and that no cut, place or neighbour changes a bit.

Each on all walks: that of GPUs, and those of CPU drivers and of matrix units where this device has
them (see tests/lavapipe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.samples import sampled
from vkmoe.gpu.program import Dispatch, Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.token_io import param_words
from vkmoe.kernels.attention.cases import (
    deepseek2_shape,
    gemma4_shape,
    gpt_oss_shape,
    hunyuan_shape,
    qwen3_shape,
    wide_shape,
)
from vkmoe.kernels.attention.operations import KvCache
from vkmoe.kernels.attention.shapes import (
    MAX_HEAD_DIM,
    MAX_RANK,
    MAX_ROPE_DIM,
    AttentionShape,
    LatentShape,
)
from vkmoe.kernels.attention.twins import first_seen
from vkmoe.kernels.comparison import Checks
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Variant
from vkmoe.kernels.prompt_attention.cases import PromptBatch, Prompts
from vkmoe.kernels.prompt_attention.operations import (
    PromptTensors,
    append_rows,
    choose_tiling,
    prompt_attention,
)
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KV_NUMBERS, KvTypes, both
from vkmoe.selftest.suite import runnable

from .tunings import chosen_device, tuning_for

N_ROWS = 24  # of most programs
NAMES = {"": "gpu", "+blocks64": "cpu", "+matrix": "units"}
WALKS = [
    suffix
    for suffix in NAMES
    if runnable(Variant.parse(f"prompt_attention{suffix}"), chosen_device())
]
every_walk = pytest.mark.parametrize("walk", WALKS, ids=NAMES.__getitem__)

SHAPES: dict[str, AttentionShape | LatentShape] = {
    "qwen3": qwen3_shape(),
    "qwen3 f32": qwen3_shape(kv_types=both("f32")),
    "gpt-oss": gpt_oss_shape(),
    "deepseek2": deepseek2_shape(),
    "deepseek2 f32": deepseek2_shape(kv_type="f32"),
    "qwen3 q8_0": qwen3_shape(kv_types=both("q8_0")),
    "gpt-oss q8_0, f16": gpt_oss_shape(kv_types=KvTypes("q8_0", "f16")),
    "deepseek2 q8_0": deepseek2_shape(kv_type="q8_0"),
    "gemma4, 96": gemma4_shape(head_dim=96, rotary_dim=96, kv_types=both("f32")),
    "gemma4 without norms of q and k": gemma4_shape(norm="none", kv_types=KvTypes("f16", "q8_0")),
    "full norm, 128": qwen3_shape(
        n_heads=4, n_kv_heads=4, norm="full_width", head_dim=128, rotary_dim=128
    ),
    "partial pairs, 32": qwen3_shape(n_heads=6, head_dim=32, rotary_dim=16, rope_style="normal"),
    "group 5, partial halves, 96": qwen3_shape(
        n_heads=10, n_kv_heads=2, head_dim=96, rotary_dim=48, kv_types=both("f32")
    ),
    "group 40, 8": qwen3_shape(n_heads=40, n_kv_heads=1, head_dim=8, rotary_dim=8, norm="none"),
    "full norm, 80, f16, q8_0": qwen3_shape(
        n_heads=4,
        n_kv_heads=4,
        norm="full_width",
        head_dim=80,
        rotary_dim=80,
        kv_types=KvTypes("f16", "q8_0"),
    ),
    "hunyuan": hunyuan_shape(),
    "hunyuan, partial pairs, q8_0": hunyuan_shape(
        n_heads=6, rotary_dim=48, rope_style="normal", kv_types=both("q8_0")
    ),
    "512": wide_shape(),
    "512, f32, without norms": wide_shape(norm="none", rotary_dim=512, kv_types=both("f32")),
    "gpt-oss q4_0, q5_1": gpt_oss_shape(kv_types=KvTypes("q4_0", "q5_1")),
    "gemma4 q5_1, q4_0, 72": gemma4_shape(
        head_dim=72, rotary_dim=72, kv_types=KvTypes("q5_1", "q4_0")
    ),
    "full norm, f16, q4_0": qwen3_shape(norm="full_width", kv_types=KvTypes("f16", "q4_0")),
    "deepseek2 q4_0": deepseek2_shape(kv_type="q4_0"),
    "56 + 24, q5_1": deepseek2_shape(kv_rank=56, rope_dim=24, kv_type="q5_1"),
    "512, q8_0, window": wide_shape(window=20, kv_types=both("q8_0")),
}
OF_ANY_KIND = ["qwen3", "gpt-oss", "deepseek2", "512"]
OF_QUANTS = ["gpt-oss q8_0, f16", "deepseek2 q8_0", "gpt-oss q4_0, q5_1", "56 + 24, q5_1"]


def case_of(runner: Runner, name: str, walk: str, n_rows: int = N_ROWS) -> Prompts:
    return Prompts(
        runner, SHAPES[name], tuning_for(walk, 8 if walk == "+blocks64" else 64, 4), n_rows
    )


def step(case: Prompts, batch: PromptBatch) -> NDArray[np.float32]:
    """Run a batch and check all it left; returns the output."""
    checks = Checks()
    out = case.step(batch, checks)
    checks.verify()
    return out


@every_walk
@pytest.mark.parametrize("name", sampled(SHAPES, ("gpt-oss q8_0, f16", "deepseek2").__contains__))
@pytest.mark.sample(2)
def test_chunks_of_two_sequences(runner: Runner, name: str, walk: str) -> None:
    """A prompt in chunks, another beside it, both in one chunk, and rows from the middle."""
    case = case_of(runner, name, walk)
    step(case, case.draw([0]))
    step(case, case.draw([*range(1, 18), *range(7)], [0] * 17 + [1] * 7))
    step(case, case.draw([18, 7, 19, 8], [0, 1, 0, 1]))
    step(case, case.draw(range(20, 44)))
    step(case, case.draw(range(44, 68)))
    step(case, case.draw([*range(9, 13), 30, 31, 68], [1] * 4 + [0] * 3))


@every_walk
def test_wide_rows(runner: Runner, walk: str) -> None:
    """What has fewest columns a workgroup; on CPU drivers the compiler takes too long for more."""
    shape = qwen3_shape(n_heads=2, n_kv_heads=1, head_dim=256, rotary_dim=256)
    case = Prompts(runner, shape, tuning_for(walk, 8 if walk == "+blocks64" else 64, 4), N_ROWS)
    step(case, case.draw(range(24)))
    step(case, case.draw(range(24, 40)))


@pytest.mark.parametrize("kv_type", KV_NUMBERS)
def test_the_widest_latent_rows(runner: Runner, kv_type: str) -> None:
    shape = deepseek2_shape(
        kv_rank=MAX_RANK, rope_dim=MAX_ROPE_DIM, n_heads=3, kv_type=kv_type, context=64
    )
    case = Prompts(runner, shape, tuning_for("", 64, 4), N_ROWS)
    step(case, case.draw(range(24)))
    step(case, case.draw(range(24, 40)))


# ----- the law -----


def outputs(case: Prompts, batch: PromptBatch, cuts: Sequence[int]) -> NDArray[np.float32]:
    """The outputs of a batch that is run in pieces, cut at some rows."""
    borders = [0, *cuts, len(batch.raw)]
    spans = [range(a, b) for a, b in pairwise(borders)]
    return np.concatenate([case.outputs(batch.part(span)) for span in spans])


@every_walk
@pytest.mark.parametrize("name", [*OF_ANY_KIND, *OF_QUANTS])
@pytest.mark.sample(4)
def test_no_cut_changes_a_bit(runner: Runner, name: str, walk: str) -> None:
    """100 positions: in the longest chunks, row by row, and cut at random; caches too."""
    rng, results = np.random.default_rng(1), []
    random_cuts = [np.cumsum(rng.integers(1, N_ROWS + 1, 200)) for _ in range(4)]
    for cuts in (range(N_ROWS, 100, N_ROWS), range(1, 100), *random_cuts):
        case = case_of(runner, name, walk)
        batch = case.draw(range(100))
        out = outputs(case, batch, [int(cut) for cut in cuts if cut < 100])
        caches = [runner.fetch(cache.address, cache.rows.data.nbytes) for cache in case.caches]
        results.append(np.concatenate([out.view(np.uint8).ravel(), *caches]))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@every_walk
@pytest.mark.parametrize("name", OF_ANY_KIND)
def test_no_place_or_neighbour_changes_a_bit(runner: Runner, name: str, walk: str) -> None:
    """Rows that go on from a filled cache: in any order, among rows of another sequence."""
    case, rng = case_of(runner, name, walk), np.random.default_rng(2)
    for sequence in (0, 1):
        for start in range(0, 72, N_ROWS):
            case.outputs(case.draw(range(start, start + N_ROWS), [sequence] * N_ROWS))
    batch = case.draw([*range(60, 72), *range(33, 45)], [0] * 12 + [1] * 12)
    alone = outputs(case, batch, range(1, N_ROWS))
    assert np.isfinite(alone).all()
    orders = [rng.permutation(N_ROWS)[:n].tolist() for n in (24, 24, 23, 17, 5, 2)]
    for order in (list(range(24)), list(range(23, -1, -1)), *orders):
        np.testing.assert_array_equal(case.outputs(batch.part(order)), alone[order])


@every_walk
def test_the_size_of_a_program_changes_no_bit(runner: Runner, walk: str) -> None:
    outs = []
    for n_rows in (7, N_ROWS):
        case = case_of(runner, "qwen3", walk, n_rows)
        outs.append(outputs(case, case.draw(range(50)), range(7, 50, 7)))
    np.testing.assert_array_equal(outs[0], outs[1])


@every_walk
@pytest.mark.parametrize(  # latent attention has no windows
    ("name", "window"), [*product(("qwen3 f32", "gpt-oss"), (0, 3)), ("deepseek2", 0)]
)
def test_what_is_not_seen_has_no_say(runner: Runner, name: str, window: int, walk: str) -> None:
    """What comes later, what a window has left, and another sequence may hold NaN and infinities.

    Other rows of the same tiles see it: 0 times it must not reach those that do not.
    """
    shape, outs = SHAPES[name], []
    if isinstance(shape, AttentionShape):
        shape = replace(shape, window=window)
    for factor in (1.0, np.inf, np.nan):
        case = Prompts(runner, shape, tuning_for(walk, 8 if walk == "+blocks64" else 64, 4), N_ROWS)
        batch = case.draw([*range(42), *range(9)], [0] * 42 + [1] * 9)
        batch.raw[41:] *= factor
        batch.raw[: 32 - window if window else 0] *= factor
        outs.append(outputs(case, batch, range(N_ROWS, 51, N_ROWS))[31:41])
    assert np.isfinite(outs[0]).all()
    for other in outs[1:]:
        np.testing.assert_array_equal(outs[0], other)


# ----- windows, sinks, scores -----


@every_walk
def test_windows_of_every_length(runner: Runner, walk: str) -> None:
    """What no row sees is NaN, in front of the windows and behind the rows."""
    tuning, first = tuning_for(walk, 8 if walk == "+blocks64" else 64, 4), 75
    for window in (1, 2, 31, 32, 33, 60, 75, 76, 100):
        filled = slice(first_seen(first, window), first)
        case = Prompts(runner, gpt_oss_shape(window=window), tuning, N_ROWS, filled)
        step(case, case.draw(range(first, first + N_ROWS)))
        step(case, case.draw([first + N_ROWS, first, first + 1], [0, 1, 1]))


@every_walk
def test_a_window_that_holds_everything_changes_no_bit(runner: Runner, walk: str) -> None:
    outs = []
    for window in (0, 50, 1 << 20):
        case = Prompts(
            runner,
            gpt_oss_shape(window=window),
            tuning_for(walk, 8 if walk == "+blocks64" else 64, 4),
            N_ROWS,
        )
        outs.append(outputs(case, case.draw(range(50)), range(N_ROWS, 50, N_ROWS)))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


@every_walk
def test_sinks_from_minus_infinity_to_far_above_the_scores(runner: Runner, walk: str) -> None:
    """A sink of -infinity is no sink; one far above takes all weight."""
    sinks = np.array([-np.inf, -3e38, -1e4, -20.0, 0.0, 20.0, 1e4, 3e38], np.float32)
    tuning, outs = tuning_for(walk, 8 if walk == "+blocks64" else 64, 4), []
    for shape, given in ((gpt_oss_shape(), sinks), (gpt_oss_shape(sinks=False), None)):
        case = Prompts(runner, shape, tuning, N_ROWS, sinks=given)
        outs.append(step(case, case.draw(range(N_ROWS))).reshape(N_ROWS, len(sinks), -1))
    with_sinks, without = outs
    np.testing.assert_allclose(with_sinks[:, :3], without[:, :3], rtol=1e-6)
    assert not with_sinks[:, 6:].any() and np.abs(without[:, 6:]).all()


@every_walk
def test_large_scores_do_not_overflow(runner: Runner, walk: str) -> None:
    """A running maximum that keeps rising by hundreds."""
    shape = qwen3_shape(norm="none", scale=30.0, kv_types=both("f32"))
    case = Prompts(runner, shape, tuning_for(walk, 8 if walk == "+blocks64" else 64, 4), N_ROWS)
    for start in range(0, 48, N_ROWS):
        step(case, case.draw(range(start, start + N_ROWS)))


# ----- what is chosen and declared -----


@every_walk
def test_neither_context_nor_window_have_a_say(walk: str) -> None:
    tuning = tuning_for(walk, 8 if walk == "+blocks64" else 64, 4)
    shapes = [gpt_oss_shape(context=n, window=w) for n in (1, 100, 1 << 17) for w in (0, 1, 128)]
    assert len({choose_tiling(shape, tuning) for shape in shapes}) == 1


def test_every_width_fits() -> None:
    """choose_tiling asserts that the tiles fit in the shared memory that all devices have."""
    for kv_type in KV_NUMBERS:
        for mapping in ("lanes", "blocks"):
            tuning = Tuning(mapping, 64, 4, False, load_64bit=mapping == "blocks")
            for dim in range(8, MAX_HEAD_DIM + 1, 8):
                shape = qwen3_shape(head_dim=dim, rotary_dim=dim, kv_types=both(kv_type))
                assert choose_tiling(shape, tuning).workgroup_heads >= (4 if dim <= 256 else 2)
            for rank in range(8, MAX_RANK + 1, 8):
                latent = deepseek2_shape(kv_rank=rank, rope_dim=MAX_ROPE_DIM, kv_type=kv_type)
                assert choose_tiling(latent, tuning).workgroup_heads >= 1


def test_what_is_read_and_written_by_address_is_declared() -> None:
    shape = gpt_oss_shape(norm="per_head", context=64, kv_types=KvTypes("q8_0", "f16"))
    places = {"keys": 1 << 20, "values": 1 << 21, "rope_table": 1 << 22, "sinks": 64}
    append, attend = dispatches(shape, KvCache(**places, q_gain=256, k_gain=512, n_regions=3))
    sizes = zip(("keys", "values"), shape.cache_bytes, strict=True)
    caches = [memory_range(places[name], 3 * n_bytes) for name, n_bytes in sizes]
    assert all(cache in append.writes and cache in attend.reads for cache in caches)
    assert memory_range(1 << 22, shape.rope_bytes) in append.reads
    assert memory_range(256, 4 * shape.head_dim) in append.reads
    assert memory_range(64, 4 * shape.n_heads) in attend.reads
    assert not any(cache in attend.writes for cache in caches)


def dispatches(shape: AttentionShape, cache: KvCache) -> list[Dispatch]:
    """What is appended for a prompt of 5 rows."""
    program, tuning = Program("prompts"), tuning_for("", 64, 4)
    op = OpContext(program, tuning, n_rows=5)
    params = TensorRef("params", param_words(5))
    qkv = TensorRef("qkv", 5 * shape.qkv_width, 5)
    out = TensorRef("out", 5 * shape.n_heads * shape.head_dim, 5)
    append_rows(op, shape, cache, qkv, params)
    tiling = choose_tiling(shape, tuning)
    prompt_attention(op, shape, tiling, cache, qkv, PromptTensors(params, out))
    return program.dispatches()
