"""Attention of tokens, grouped and latent, against its twins: shapes, positions, splits, caches.

Windows and sinks: test_attention_windows.py. What latent attention alone has:
test_latent_attention.py.
"""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe import kv_types
from vkmoe.choices import KvType
from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention.caches import CacheShape, KvRows, cache_row, hadamard
from vkmoe.kernels.attention.cases import (
    AttentionCase,
    deepseek2_shape,
    gemma4_shape,
    hunyuan_shape,
    qwen3_shape,
    wide_shape,
)
from vkmoe.kernels.attention.shapes import (
    MAX_HEAD_DIM,
    AttentionShape,
    AttentionSplit,
    LatentShape,
    choose_split,
)
from vkmoe.kernels.attention.twins import split_positions
from vkmoe.kernels.comparison import Checks
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KvTypes, both

CPU_TUNING = Tuning("blocks", 8, 8, False)
GPU_TUNING = Tuning("lanes", 64, 4, False)
both_mappings = pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])

SHAPES: dict[str, AttentionShape | LatentShape] = {
    "qwen3": qwen3_shape(),
    "qwen3 f32": qwen3_shape(kv_types=both("f32")),
    "group 1, full norm": qwen3_shape(
        n_heads=4,
        n_kv_heads=4,
        norm="full_width",
        head_dim=128,
        rotary_dim=128,
        kv_types=both("f32"),
    ),
    "group 8, 128": qwen3_shape(n_heads=16, head_dim=128, rotary_dim=128, scale=0.1),
    "one kv head, 96": qwen3_shape(
        n_heads=2, n_kv_heads=1, head_dim=96, rotary_dim=96, norm="none"
    ),
    "partial pairs, 32": qwen3_shape(n_heads=6, head_dim=32, rotary_dim=16, rope_style="normal"),
    "partial halves, 160": qwen3_shape(n_heads=3, n_kv_heads=3, head_dim=160, rotary_dim=80),
    "group 40, 80": qwen3_shape(n_heads=40, n_kv_heads=1, head_dim=80, rotary_dim=80, context=160),
    "q8_0, 128": qwen3_shape(
        n_heads=16, head_dim=128, rotary_dim=128, scale=0.1, kv_types=both("q8_0")
    ),
    "K q8_0, V f16, 80": qwen3_shape(head_dim=80, rotary_dim=80, kv_types=KvTypes("q8_0", "f16")),
    "K f32, V q8_0, 96": qwen3_shape(head_dim=96, rotary_dim=96, kv_types=KvTypes("f32", "q8_0")),
    "K f16, V f32": qwen3_shape(kv_types=KvTypes("f16", "f32")),
    "q4_0, 128": qwen3_shape(
        n_heads=16, head_dim=128, rotary_dim=128, scale=0.1, kv_types=both("q4_0")
    ),
    "q5_1, 64": qwen3_shape(kv_types=both("q5_1")),
    "K q5_1, V q4_0, 80": qwen3_shape(head_dim=80, rotary_dim=80, kv_types=KvTypes("q5_1", "q4_0")),
    "K f32, V q5_1, 72": qwen3_shape(head_dim=72, rotary_dim=72, kv_types=KvTypes("f32", "q5_1")),
    "K q4_0, V f16, full norm": qwen3_shape(norm="full_width", kv_types=KvTypes("q4_0", "f16")),
    "512, q5_1, q8_0": wide_shape(kv_types=KvTypes("q5_1", "q8_0")),
    "gemma4, q4_0, q5_1": gemma4_shape(kv_types=KvTypes("q4_0", "q5_1")),
    "gemma4, another's q4_0": gemma4_shape(appends=False, kv_types=both("q4_0")),
    "group 16, 256": qwen3_shape(
        n_heads=16, n_kv_heads=1, head_dim=256, rotary_dim=256, kv_types=both("f32")
    ),
    "gemma4, 512": wide_shape(),
    "512, f32, without norms": wide_shape(norm="none", rotary_dim=512, kv_types=both("f32")),
    "512, q8_0, full norm": wide_shape(norm="full_width", kv_types=both("q8_0")),
    "group 5, 320": qwen3_shape(n_heads=5, n_kv_heads=1, head_dim=320, rotary_dim=64),
    "gemma4, another's caches": gemma4_shape(n_heads=6, n_kv_heads=1, appends=False),
    "gemma4, 96": gemma4_shape(head_dim=96, rotary_dim=96, kv_types=both("f32")),
    "gemma4, q8_0": gemma4_shape(n_heads=4, kv_types=KvTypes("f16", "q8_0"), norm="none"),
    "hunyuan, 96": hunyuan_shape(head_dim=96, rotary_dim=96, kv_types=both("f32")),
    "hunyuan, partial pairs, q8_0": hunyuan_shape(
        n_heads=6, rotary_dim=48, rope_style="normal", kv_types=both("q8_0")
    ),
    "64 + 32": deepseek2_shape(),
    "64 + 32, f32": deepseek2_shape(kv_type="f32", rope_style="neox"),
    "56 + 24, q8_0": deepseek2_shape(kv_rank=56, rope_dim=24, kv_type="q8_0"),
    "64 + 32, q4_0": deepseek2_shape(kv_type="q4_0"),
    "56 + 24, q5_1": deepseek2_shape(kv_rank=56, rope_dim=24, kv_type="q5_1"),
    "96 + 32, one head": deepseek2_shape(n_heads=1, kv_rank=96),
    "40 + 8, five heads": deepseek2_shape(n_heads=5, kv_rank=40, rope_dim=8, nope_dim=0),
    "24 + 16, many heads": deepseek2_shape(n_heads=128, kv_rank=24, rope_dim=16, kv_type="f32"),
}
of_either_kind = pytest.mark.parametrize("name", ["qwen3", "64 + 32"])
POSITIONS = (0, 1, 31, 32, 63, 64, 95, 150)


def step(case: AttentionCase, position: int, token: NDArray[np.float32]) -> NDArray[np.float32]:
    """Run a token and check all it left; returns the output."""
    checks = Checks()
    out = case.step(position, token, checks)
    checks.verify()
    return out


def run_positions(
    runner: Runner, shape: AttentionShape | LatentShape, split: AttentionSplit
) -> None:
    """Positions in rising order on one cache whose rows between are random."""
    case = AttentionCase(runner, shape, split, POSITIONS[-1])
    for position in POSITIONS:
        step(case, position, case.token())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.sample(5)
def test_cpu_mapping(runner: Runner, name: str) -> None:
    shape = SHAPES[name]
    run_positions(runner, shape, choose_split(shape, CPU_TUNING, n_splits=2))


@pytest.mark.parametrize("name", ["qwen3", "group 1, full norm", "one kv head, 96"])
def test_teams_that_are_subgroups(device: Device, runner: Runner, name: str) -> None:
    shape = SHAPES[name]
    tuning = replace(CPU_TUNING, subgroup_size=device.info.subgroup_size)
    split = choose_split(shape, tuning, n_splits=3)
    assert split.subgroup == (shape.value_dim // 8 % device.info.subgroup_size == 0)
    run_positions(runner, shape, split)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "group 8, 128",
        "one kv head, 96",
        "partial halves, 160",
        "K q8_0, V f16, 80",
        "K f32, V q8_0, 96",
        "q4_0, 128",
        "K q5_1, V q4_0, 80",
        "512, q5_1, q8_0",
        "64 + 32, q4_0",
        "56 + 24, q5_1",
        "gemma4, 512",
        "512, f32, without norms",
        "512, q8_0, full norm",
        "group 5, 320",
        "64 + 32",
        "96 + 32, one head",
        "40 + 8, five heads",
    ],
)
@pytest.mark.sample(4)
def test_gpu_mapping(runner: Runner, name: str) -> None:
    """Several teams per workgroup, lanes left over, heads of one group in several workgroups, lanes
    with more of a row than of a value.
    """
    shape = SHAPES[name]
    run_positions(runner, shape, choose_split(shape, GPU_TUNING))


@pytest.mark.parametrize("name", ["qwen3 f32", "64 + 32, f32"])
@pytest.mark.sample(1)
def test_several_subgroups(device: Device, runner: Runner, name: str) -> None:
    """Two teams that are subgroups, and the same variant where teams and subgroups differ."""
    shape = SHAPES[name]
    size = device.info.subgroup_size
    split = choose_split(shape, replace(CPU_TUNING, workgroup_size=2 * size, subgroup_size=size))
    assert split.subgroup
    run_positions(runner, shape, split)
    run_positions(runner, shape, replace(split, team_lanes=4))


@of_either_kind
def test_decoding_in_order_and_back(runner: Runner, name: str) -> None:
    """Every position from 0 past the end of a small context, each reading what the last appended.

    Positions beyond the context are clamped to its last row; a prompt can start over earlier.
    """
    shape = replace(SHAPES[name], context=70)
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING, n_splits=2), 0)
    for position in (*range(72), 12, 13):
        step(case, position, case.token())


@of_either_kind
def test_replay_leaves_the_same_bits(runner: Runner, name: str) -> None:
    shape = SHAPES[name]
    case = AttentionCase(runner, shape, choose_split(shape, GPU_TUNING), 120)
    token = case.token()
    np.testing.assert_array_equal(step(case, 120, token), step(case, 120, token))


def test_values_beyond_a_half_saturate(runner: Runner) -> None:
    """Subnormal, tiny and huge v round as NumPy rounds them; none becomes infinite."""
    shape = SHAPES["qwen3"]
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING), 5)
    token = case.token()
    powers = np.repeat(np.arange(-30, 34), 2) * np.tile([1.0, -1.0], 64)
    magnitudes = np.random.default_rng(1).uniform(1, 2, 128) * 2.0 ** np.abs(powers)
    token[-128:] = np.where(powers < 0, 1 / magnitudes, magnitudes).astype(np.float32)
    token[-4:] = 2.0**-25, 2.0**-25 * 1.001, 65520.0, 2.0**-14 - 2.0**-26
    step(case, 5, token)


@both_mappings
def test_values_round_to_nearest_even(runner: Runner, tuning: Tuning) -> None:
    """Halfway between two halves, subnormal ones too, and one float32 below and above that."""
    shape = qwen3_shape(n_heads=64, n_kv_heads=64, head_dim=256, rotary_dim=256)
    halves = np.arange(0, 0x7BFF, 6, dtype=np.uint16)
    lower, upper = (bits.view(np.float16).astype(np.float32) for bits in (halves, halves + 1))
    middle = (lower + upper) / 2
    around = [np.nextafter(middle, lower), middle, np.nextafter(middle, upper)]
    values = np.concatenate(around) * np.tile([1, -1], len(halves) * 3)[: len(halves) * 3]
    case = AttentionCase(runner, shape, choose_split(shape, tuning), 5)
    token = case.token()
    token[-len(values) :] = values
    step(case, 5, token)


def test_values_that_are_no_number_stay_so(runner: Runner) -> None:
    shape = SHAPES["qwen3"]
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING), 5)
    token = case.token()
    token[-3:] = np.nan, np.inf, -np.inf
    case.step(5, token, Checks())
    row = case.caches[1].values[-1, 5]
    assert np.isnan(row[-3]) and np.isfinite(row[:-3]).all()
    assert row[-2:].tolist() == [65504.0, -65504.0]


@both_mappings
def test_quants_are_nearest_whatever_a_block_holds(runner: Runner, tuning: Tuning) -> None:
    """The twin's very bits: ties, zeros, one value alone, infinities, and scales that no half holds
    as they are: too small, below its normal numbers, too large."""
    shape = qwen3_shape(kv_types=both("q8_0"), n_heads=16, n_kv_heads=16)
    powers = np.array([-60, -40, -24, -20, -17, -14, -7, 0, 1, 10, 15, 22, 23, 30, 100, 120])
    blocks = (
        np.random.default_rng(1).uniform(-1, 1, (32, 32)) * 2.0 ** np.repeat(powers, 2)[:, None]
    )
    blocks[::2] = np.arange(-15.5, 16.5) * 2.0 ** powers[:, None]  # all are ties:
    blocks[::2, 0] = 127 * 2.0**powers  # the scale is a power of two
    blocks[1], blocks[3, 1:], blocks[5, 7] = 0.0, 0.0, np.inf
    case = AttentionCase(runner, shape, choose_split(shape, tuning), 5)
    token, checks = case.token(), Checks()
    token[-blocks.size :] = blocks.ravel()
    case.step(5, token, checks)
    (of_values,) = (check for check in checks.checks if check.what == "appended row of the V cache")
    found = case.caches[1].values[:, 5].reshape(32, 32)
    assert of_values.ok and np.isfinite(found).all(), of_values
    away_from_zero = [*range(-15, 0), *range(1, 17)]
    np.testing.assert_array_equal(found[14, 1:], away_from_zero)


@both_mappings
@pytest.mark.parametrize("kv_type", ["q4_0", "q5_1"])
def test_small_quants_are_nearest_whatever_a_block_holds(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tuning: Tuning, kv_type: KvType
) -> None:
    """The twin's very bits without a transform: ties, both extremes of one size, zeros, one value
    alone, infinities, and scales that no half holds as they are."""
    monkeypatch.setattr(kv_types, "TRANSFORMED", frozenset())
    shape = qwen3_shape(kv_types=both(kv_type), n_heads=16, n_kv_heads=16)
    powers = np.array([-60, -40, -24, -20, -17, -14, -7, 0, 1, 10, 12, 15, 23, 30, 100, 120])
    rng = np.random.default_rng(1)
    blocks = rng.uniform(-1, 1, (32, 32)) * 2.0 ** np.repeat(powers, 2)[:, None]
    blocks[::2] = np.arange(-16, 16) / 2 * 2.0 ** powers[:, None]  # every other is a tie:
    blocks[::4, 31] = 8 * 2.0 ** powers[::2]  # of two of one size the lower gives the scale
    blocks[1], blocks[3, 1:], blocks[5, 7], blocks[7, 3] = 0.0, 0.0, np.inf, -np.inf
    case = AttentionCase(runner, shape, choose_split(shape, tuning), 5)
    token = case.token()
    token[-blocks.size :] = blocks.ravel()
    case.step(5, token, Checks())
    found = case.caches[1].values[:, 5].reshape(32, 32)
    wanted = cache_row(blocks.astype(np.float32).reshape(16, 64), kv_type).reshape(32, 32)
    np.testing.assert_array_equal(found, wanted)
    assert np.isfinite(found).all()
    if kv_type == "q4_0":
        assert found[14, :6].tolist() == [-8, -8, -7, -7, -6, -6] and found[16, 31] == 14


def test_a_block_is_packed_as_is_said() -> None:
    """Byte by byte, of 8 numbers in a row: see kv_types.glsl."""
    row = np.arange(-8, 8, dtype=np.float32).repeat(2)  # of q4_0, scale 1: quants 0, 0, 1, 1, ...
    rows = KvRows("q4_0", CacheShape(1, 1, 1, 32))
    rows.write((0, 0, 0), row)
    quants = np.arange(16).repeat(2)
    packed = [quants[8 * u + i] | quants[8 * u + 4 + i] << 4 for u in range(4) for i in range(4)]
    scale = list(np.float16(1).tobytes())
    assert rows.data.tolist() == [*packed, *scale, 0, 0, *[0] * 12]
    rows = KvRows("q5_1", CacheShape(1, 1, 1, 32))
    rows.write((0, 0, 0), np.arange(32, dtype=np.float32) + 4)  # scale 1, minimum 4
    low = [(8 * u + i) % 16 | (8 * u + 4 + i) % 16 << 4 for u in range(4) for i in range(4)]
    fifth = [sum(1 << 2 * u + h for u in (2, 3) for h in (0, 1))] * 4
    numbers = [*np.float16(1).tobytes(), *np.float16(4).tobytes()]
    assert rows.data.tolist() == [*low, *numbers, *fifth, *[0] * 8]


@pytest.mark.parametrize("kv_type", ["q4_0", "q5_1"])
def test_small_blocks_are_those_of_ggml(kv_type: KvType) -> None:
    """The numbers of the gguf package, but where it divides otherwise or has lower tops."""
    rng = np.random.default_rng(2)
    rows = (rng.normal(size=(64, 96)) * 2.0 ** rng.integers(-9, 9, (64, 1))).astype(np.float32)
    kind = gguf.GGMLQuantizationType[kv_type.upper()]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    ours = cache_row(rows, kv_type)
    assert np.mean(ours == theirs) > 0.98
    errors = [np.square(of - rows).mean() for of in (ours, theirs)]
    assert errors[0] <= errors[1] * 1.001


def test_a_transform_is_its_own_inverse_and_spreads_what_is_alone() -> None:
    alone = np.zeros((3, 64))
    alone[:, 5] = 4.0
    spread = hadamard(alone, 16)
    assert (np.abs(spread[:, :16]) == 1.0).all() and not spread[:, 16:].any()
    rows = np.random.default_rng(3).normal(size=(3, 96))
    for block in (8, 16, 32):
        np.testing.assert_allclose(hadamard(hadamard(rows, block), block), rows, atol=1e-12)
        kept = (hadamard(rows, block) @ hadamard(rows, block).T, rows @ rows.T)
        np.testing.assert_allclose(*kept, atol=1e-12)


def test_blocks_are_those_of_ggml() -> None:
    """The scales of the gguf package, and quants that differ where its own are not the nearest."""
    rng = np.random.default_rng(2)
    rows = (rng.normal(size=(64, 96)) * 2.0 ** rng.integers(-9, 9, (64, 1))).astype(np.float32)
    packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    theirs = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    steps = np.ascontiguousarray(packed.reshape(64, 3, 34)[..., :2]).view(np.float16)
    step = np.repeat(steps.astype(np.float64).reshape(64, 3), 32, axis=1)
    ours = cache_row(rows, "q8_0")
    np.testing.assert_array_equal(ours / step, np.round(ours / step))
    assert (np.abs(ours - rows) <= step / 2).all()
    assert (np.abs(ours - theirs) <= step).all() and np.mean(ours != theirs) < 0.02


@pytest.mark.parametrize("kv_type", ["q8_0", "q5_1", "q4_0"])
def test_a_block_with_a_value_that_is_no_number_is_none(runner: Runner, kv_type: KvType) -> None:
    shape = qwen3_shape(kv_types=both(kv_type))
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING), 5)
    token = case.token()
    token[-3] = np.nan
    case.step(5, token, Checks())
    row = case.caches[1].values[-1, 5]
    assert np.isnan(row[32:]).all() and np.isfinite(row[:32]).all()


@pytest.mark.parametrize(
    "shape", [qwen3_shape(norm="none", kv_types=both("f32")), SHAPES["64 + 32, f32"]]
)
def test_large_scores_do_not_overflow(runner: Runner, shape: AttentionShape | LatentShape) -> None:
    """A running maximum that keeps rising by hundreds."""
    shape = replace(shape, scale=30.0)
    case = AttentionCase(runner, shape, choose_split(shape, CPU_TUNING, n_splits=1), 40)
    step(case, 40, case.token())


def test_split_borders() -> None:
    """Splits are multiples of 32, cover the positions, and none but the last is short."""
    for n_splits in (1, 2, 3, 16):
        for position in range(700):
            length = split_positions(position, n_splits)
            assert length % 32 == 0 and length * n_splits > position
            assert length == 32 or (length - 32) * n_splits <= position


@both_mappings
@of_either_kind
def test_the_context_has_no_say_in_the_split(tuning: Tuning, name: str) -> None:
    """Splits are sums of their own: a larger cache must not cut the same positions otherwise."""
    shapes = (replace(SHAPES[name], context=n) for n in (1, 33, 100, 4096, 1 << 17))
    assert len({choose_split(shape, tuning) for shape in shapes}) == 1


def test_choices_fit_in_shared_memory() -> None:
    for head_dim in (*range(32, MAX_HEAD_DIM + 1, 32), 40, 80, 8):
        for group in (1, 2, 4, 5, 8, 12, 16, 71, 128):
            shape = qwen3_shape(
                n_heads=4 * group,
                n_kv_heads=4,
                head_dim=head_dim,
                rotary_dim=head_dim,
                context=4096,
                kv_types=both("f32"),
            )
            for tuning in (CPU_TUNING, GPU_TUNING, Tuning("lanes", 128, 4, True, subgroup_size=32)):
                split = choose_split(shape, tuning)
                assert split.shared_bytes(shape) <= 16384
                assert (head_dim // 8) % split.team_lanes == 0
