"""Sliding windows and sinks: against the twins, beside full attention, and what they may read."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_attention import CPU_TUNING, GPU_TUNING, both_mappings, step
from vkmoe.gpu.program import Dispatch, Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention.cases import AttentionCase, gpt_oss_shape, qwen3_shape
from vkmoe.kernels.attention.operations import AttentionTensors, KvCache, attention
from vkmoe.kernels.attention.shapes import AttentionShape, choose_split
from vkmoe.kernels.attention.twins import attention as attention_twin
from vkmoe.kernels.attention.twins import attention_combine, first_seen
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.inputs import PARAMS
from vkmoe.kernels.tuning import Tuning


@both_mappings
def test_windows_of_every_length(runner: Runner, tuning: Tuning) -> None:
    """Alone, within a split, across splits, as long as the context: what is not seen is NaN."""
    position = 150
    for window in (1, 2, 31, 32, 33, 100, 128, 150, 151, 152, 500):
        shape = gpt_oss_shape(window=window)
        unseen = first_seen(position, window)
        split = choose_split(shape, tuning, n_splits=3)
        case = AttentionCase(runner, shape, split, position, n_unseen=unseen)
        step(case, position, case.token())


def test_decoding_through_a_window_and_back(runner: Runner) -> None:
    """The cache keeps every position, so that a prompt can go on from an earlier one."""
    shape = gpt_oss_shape(window=20, context=80)
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING, n_splits=3), 0)
    for position in (*range(70), *range(30, 36), 5):
        step(case, position, case.token())


def test_a_window_that_holds_everything_changes_no_bit(runner: Runner) -> None:
    outs = []
    for window in (0, 91, 1 << 20):
        shape = gpt_oss_shape(window=window)
        case = AttentionCase(runner, shape, choose_split(shape, GPU_TUNING, n_splits=3), 90)
        outs.append(step(case, 90, case.token()))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_windowed_and_full_layers_share_pipelines() -> None:
    shapes = [gpt_oss_shape(window=window) for window in (0, 128)]
    full, windowed = (
        dispatches(shape, KvCache(256, 1 << 20, 1 << 21, sinks=64)) for shape in shapes
    )
    for one, other in zip(full, windowed, strict=True):
        assert (one.variant, one.constants) == (other.variant, other.constants)
        assert one.push != other.push


def test_sinks_from_minus_infinity_to_far_above_the_scores(runner: Runner) -> None:
    """A sink of -infinity is no sink, bit by bit; one far above takes all weight."""
    sinks = np.array([-np.inf, -3e38, -1e4, -20.0, 0.0, 20.0, 1e4, 3e38], np.float32)
    outs = []
    for shape, given in ((gpt_oss_shape(), sinks), (gpt_oss_shape(sinks=False), None)):
        split = choose_split(shape, CPU_TUNING, n_splits=3)
        case = AttentionCase(runner, shape, split, 150, sinks=given)
        outs.append(step(case, 150, case.token()).reshape(len(sinks), -1))
    with_sinks, without = outs
    np.testing.assert_array_equal(with_sinks[:3], without[:3])
    assert (np.abs(with_sinks[4]) < np.abs(without[4])).all()
    assert not with_sinks[6:].any() and np.abs(without[6:]).all()


@both_mappings
def test_sinks_with_few_positions(runner: Runner, tuning: Tuning) -> None:
    """The first token: the sink is the only thing that its own value competes with."""
    shape = gpt_oss_shape()
    case = AttentionCase(runner, shape, choose_split(shape, tuning, n_splits=3), 0)
    token = case.token()
    out = step(case, 0, token).reshape(shape.n_heads, -1)
    value = token[-shape.n_kv_heads * shape.head_dim :].reshape(shape.n_kv_heads, -1)
    share = out / np.repeat(value, shape.group, axis=0)
    assert (share < 1.0).all() and (share > 0.0).all()
    step(case, 1, case.token())


@pytest.mark.parametrize("window", [0, 1, 7, 40])
def test_the_twins_are_the_masked_softmax_with_a_column_more(window: int) -> None:
    """As gpt-oss has it: i sees j if i - j < window; the sink is one more logit, then dropped."""
    rng, position, shape = np.random.default_rng(window), 37, qwen3_shape(norm="none")
    case_q, case_k, case_v = (rng.normal(size=(n, 64)).astype(np.float32) for n in (8, 2, 2))
    keys, values = (rng.normal(size=(2, 60, 64)) for _ in range(2))
    sinks = rng.normal(size=8)
    keys[:, position], values[:, position] = case_k, case_v
    span = slice(first_seen(position, window), position + 1)
    partials = attention_twin(shape.scale * case_q, keys[:, span], values[:, span], 2)
    distance = position - np.arange(60)
    seen = (distance >= 0) & ((distance < window) if window else True)
    for head in range(8):
        scores = np.where(seen, keys[head // 4] @ case_q[head] * shape.scale, -np.inf)
        powers = np.exp(np.append(scores, sinks[head]))
        wanted = (powers / powers.sum())[:-1] @ values[head // 4]
        found = attention_combine(partials, position, window, sinks)[head]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_what_the_join_reads_by_address_is_declared() -> None:
    shape = gpt_oss_shape()
    first, join = dispatches(shape, KvCache(256, 1 << 20, 1 << 21, sinks=64))
    sinks = memory_range(64, 4 * shape.n_heads)
    assert sinks in join.reads and sinks not in first.reads
    _, plain = dispatches(qwen3_shape(norm="none"), KvCache(256, 1 << 20, 1 << 21))
    assert not any(found.resource == sinks.resource for found in plain.reads)


def test_a_shape_with_sinks_needs_their_address() -> None:
    with pytest.raises(AssertionError):
        dispatches(gpt_oss_shape(), KvCache(256, 1 << 20, 1 << 21))


def test_the_window_has_no_say_in_the_split() -> None:
    for tuning in (CPU_TUNING, GPU_TUNING):
        splits = {choose_split(gpt_oss_shape(window=n), tuning) for n in (0, 1, 128, 4096)}
        assert len(splits) == 1


def dispatches(shape: AttentionShape, cache: KvCache) -> list[Dispatch]:
    """Attention and its join, as appended to a program."""
    program, split = Program("attention"), choose_split(shape, GPU_TUNING)
    qkv = TensorRef("qkv", shape.qkv_width)
    partials = TensorRef("partials", split.partials_words(shape))
    out = TensorRef("out", shape.n_heads * shape.head_dim)
    op = OpContext(program, GPU_TUNING, "attention")
    attention(op, shape, split, cache, qkv, AttentionTensors(PARAMS, partials, out))
    return list(program.dispatches("attention"))
