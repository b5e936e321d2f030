"""What latent attention alone has; and its twin against attention with k and v written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.kernels.test_attention import CPU_TUNING, GPU_TUNING, step
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import MEMORY, Dispatch, Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention.cases import AttentionCase, deepseek2_shape
from vkmoe.kernels.attention.operations import (
    AttentionTensors,
    LatentCache,
    LatentQkv,
    latent_attention,
)
from vkmoe.kernels.attention.shapes import choose_split
from vkmoe.kernels.attention.twins import (
    LatentInputs,
    append_latent_row,
    attention_combine,
    rotate,
)
from vkmoe.kernels.attention.twins import attention as attention_twin
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.inputs import PARAMS
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KV_NUMBERS


def test_the_rows_of_deepseek_v2(device: Device, runner: Runner) -> None:
    """512 + 64, as this device would split them."""
    shape = deepseek2_shape(n_heads=2, kv_rank=512, rope_dim=64, nope_dim=128, scale=192**-0.5)
    tuning = replace(CPU_TUNING, subgroup_size=device.info.subgroup_size)
    case = AttentionCase(runner, shape, choose_split(shape, tuning), 150)
    step(case, 150, case.token())


def test_dims_beyond_a_half_saturate(runner: Runner) -> None:
    """Huge dims of the rotated part; the compressed part is normed, so that its gain decides."""
    shape = deepseek2_shape()
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING, n_splits=2), 5)
    token = case.token()
    token[-shape.rope_dim :] *= 1e6
    step(case, 5, token)
    (cache,) = case.caches
    assert np.abs(cache.values[0, 5].astype(np.float32)).max() == 65504.0


def test_the_twin_is_attention_with_k_and_v_written_out() -> None:
    """k_h = [U_h c | r], v_h = V_h c (arXiv:2405.04434, eq. 9-17): absorbing U_h is the same."""
    rng, position, scale = np.random.default_rng(1), 37, 0.2
    up_k, up_v = rng.normal(size=(3, 10, 24)), rng.normal(size=(3, 6, 24))
    q_nope, q_rope = rng.normal(size=(3, 10)), rng.normal(size=(3, 8))
    rows, kv, gain = rng.normal(size=(60, 32)), rng.normal(size=32), rng.normal(size=24)
    angles = rng.uniform(-3, 3, (60, 4))
    rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    absorbed = np.einsum("hd,hdr->hr", q_nope, up_k)
    inputs = LatentInputs(absorbed, q_rope, kv, gain, rope, "normal", 1e-6, "f32")
    queries, ((row,),) = append_latent_row(inputs, position)
    normed = gain * kv[:24] / np.sqrt((kv[:24] ** 2).mean() + 1e-6)
    np.testing.assert_allclose(row[:24], normed, rtol=1e-6)
    turned = rotate(kv[None, 24:], rope[position], "normal")[0]
    np.testing.assert_allclose(row[24:], turned, rtol=1e-6)
    seen = np.vstack([rows[:position], row])
    partials = attention_twin(scale * queries, seen[None], seen[None, :, :24], 2)
    attended = attention_combine(partials, position)
    turned = rotate(q_rope, rope[position], "normal")
    for head in range(3):
        keys = np.hstack([seen[:, :24] @ up_k[head].T, seen[:, 24:]])
        powers = np.exp(scale * keys @ np.concatenate([q_nope[head], turned[head]]))
        wanted = powers / powers.sum() @ (seen[:, :24] @ up_v[head].T)
        np.testing.assert_allclose(up_v[head] @ attended[head], wanted, rtol=1e-9)


def test_what_is_read_and_written_is_declared() -> None:
    """The cache counts as read and written; of a tensor with q and kv, only their words."""
    shape = deepseek2_shape(n_heads=5, kv_rank=40, rope_dim=8, nope_dim=0)
    cache = LatentCache(1 << 20, 1 << 22, 1 << 23)
    program, split = Program("attention"), choose_split(shape, GPU_TUNING)
    absorbed, out = TensorRef("absorbed", 300), TensorRef("out", 300)
    raw, partials = TensorRef("raw", 500), TensorRef("partials", split.partials_words(shape))
    inputs = LatentQkv(absorbed, raw, raw, q_offset=60, kv_offset=7)
    tensors = AttentionTensors(PARAMS, partials, out)
    op = OpContext(program, GPU_TUNING, "attention")
    latent_attention(op, shape, split, cache, inputs, tensors)
    first, join = program.commands
    assert isinstance(first, Dispatch) and isinstance(join, Dispatch)
    rows = memory_range(cache.rows, *shape.cache_bytes)
    assert {found for found in first.writes if found.resource == MEMORY} == {rows}
    assert {found for found in first.reads if found.resource == MEMORY} == {
        rows,
        memory_range(cache.rope_table, shape.rope_bytes),
        memory_range(cache.gain, 4 * shape.kv_rank),
    }
    assert {raw.words(60, 5 * 8), raw.words(7, 48), absorbed.words(0, 200)} <= set(first.reads)
    assert join.writes == (out.words(0, 200),)
    assert shape.cache_bytes == (shape.context * 48 * 2,)


def test_choices_fit_in_shared_memory() -> None:
    """Rows of any width, any number of heads, narrow and wide subgroups; at 512 + 64 several heads
    share a row on every GPU whose lanes have registers for it: not on GCN (subgroups of 64 only),
    nor where a workgroup has few lanes."""
    tunings = [Tuning("lanes", size, 4, True, subgroup_size=n)
               for size in (32, 64, 128) for n in (0, 4, 8, 16, 32, 64)]  # fmt: skip
    tunings += [replace(CPU_TUNING, subgroup_size=n) for n in (0, 4, 8)]
    for kv_rank, rope_dim in ((512, 64), (64, 32), (96, 32), (8, 8), (384, 128), (1024, 256)):
        for n_heads in (1, 6, 16, 40, 128):
            for kv_type in KV_NUMBERS:
                shape = deepseek2_shape(
                    n_heads=n_heads, kv_rank=kv_rank, rope_dim=rope_dim, kv_type=kv_type
                )
                for tuning in tunings:
                    split = choose_split(shape, tuning)
                    split.check(shape)
                    has_room = tuning.workgroup_size >= 64 and tuning.subgroup_size < 64
                    if kv_rank == 512 and n_heads > 1 and tuning.mapping == "lanes" and has_room:
                        assert split.workgroup_heads > 1
