"""What every compiled shader declares and may touch, read from its SPIR-V; no device involved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast, get_args

import pytest

import vkmoe.selftest  # noqa: F401  registers every kernel
from tests.gpu.invented import AMD
from tests.gpu.spirv import (
    BINDING,
    LOAD,
    NON_READABLE,
    NON_WRITABLE,
    OFFSET,
    PHYSICAL,
    PUSH_CONSTANT,
    SET,
    STORAGE_BUFFER,
    STORE,
    Access,
    Module,
)
from tests.kernels.tunings import SAMPLE_TYPES
from vkmoe.choices import KvType
from vkmoe.gpu.device import spirv_folder
from vkmoe.gpu.kernels import KERNELS, KernelSpec, PushField
from vkmoe.kernels.attention.shapes import AttentionShape, LatentShape, choose_split, type_numbers
from vkmoe.kernels.launches import (
    UNITS_SHARED_BYTES,
    Launch,
    MatvecFamily,
    Tile,
    kernel_class,
)
from vkmoe.kernels.prompt_attention.operations import choose_tiling
from vkmoe.kernels.router.operations import MAX_EXPERTS
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KV_NUMBERS, KvTypes, both
from vkmoe.quants.code_books import HAS_CODE_BOOK, LARGEST_BYTES, code_books

NAMES = sorted(path.stem for path in spirv_folder().glob("*.spv"))
SHARED_LIMIT = 16384  # the least maxComputeSharedMemorySize Vulkan allows
SUBGROUP_SIZE, SUBGROUP_EQ_MASK = 36, 4416  # built-ins
SHADER, FLOAT16, INT64, SUBGROUP, SUBGROUP_ARITHMETIC = 1, 9, 11, 61, 63  # capabilities
MEMORY_MODEL, COOPERATIVE_MATRIX = 5345, 6022
SUBGROUP_SHUFFLE, ADDRESSES = 65, 5347
WEIGHT_LOADS = {Access(LOAD, "v4u32", 16), Access(LOAD, "v2u64", 16)}
WORD_LOAD, ENTRY_LOAD = Access(LOAD, "u32", 4), Access(LOAD, "v2u32", 8)
EXPERT_FAMILIES = {"expert_gate_up", "expert_down"}
KEEP_FAMILIES = {f"{name}_keep" for name in EXPERT_FAMILIES}
ATTENTION_FAMILIES = {"attention", "latent_attention"}
APPENDING_FAMILIES = {"append_rows", "append_latent_rows"}
RECURRENT_FAMILIES = {"delta_inputs", "delta_step"}
TILE_FAMILIES = {"matmul", "matmul_residual", "expert_matmul_gate_up", "expert_matmul_down"}
DOT_FAMILIES = {"matvec", "matvec_residual", "embed"} | EXPERT_FAMILIES | KEEP_FAMILIES
# Other types have small planes: a word holds two halves or four exponents, so 4 bytes are loaded.
TYPES_WITHOUT_PLANES = {"f32", "f16", "bf16", "q4_k", "q5_k"}
DEFAULT_TUNINGS = (
    Tuning("blocks", 8, 8, False, subgroup_size=8),
    Tuning("blocks", 8, 8, False, load_64bit=True, subgroup_size=8),
    Tuning("lanes", 64, 4, False),
    Tuning("lanes", 64, 4, True, subgroup_size=32),
    Tuning("lanes", 64, 4, True, subgroup_size=32, half_tiles=True),
)


@cache
def module(name: str) -> Module:
    return Module.parse((spirv_folder() / f"{name}.spv").read_bytes())


def family(name: str) -> str:
    return name.partition("+")[0].partition(".")[0]


def weight_type(name: str) -> str:
    return name.partition("+")[0].partition(".")[2]


def spec(name: str) -> KernelSpec:
    return KERNELS[family(name)]


def every_variant(check: Callable[[str], None]) -> Callable[[list[str]], None]:
    """Make one test of a check: of all variants, as an item for each costs more than the check.

    Every type of weights has the same 45 variants: those of most types are read in the sweep.
    """
    some = ("", *SAMPLE_TYPES, "IQ2_S")  # one has a code book
    first = [name for name in NAMES if weight_type(name).upper() in some]
    others = pytest.param(sorted({*NAMES} - {*first}), marks=pytest.mark.full)

    @pytest.mark.parametrize("names", [first, others], ids=["some types", "other types"])
    def test(names: list[str]) -> None:
        failures = {}
        for name in names:
            try:
                check(name)
            except AssertionError as failure:
                failures[name] = failure
        assert not failures

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


@every_variant
def test_bindings_are_those_of_the_specification(name: str) -> None:
    """Set 0, bindings 0 ... n-1; "r" is readonly, "w" writeonly, "rw" neither."""
    made = module(name)
    found = {}
    for variable in made.variables:
        if variable.storage != STORAGE_BUFFER:
            continue
        marks = made.decorations(variable.id)
        assert marks[SET] == 0
        flags: set[int] = set(marks)
        members = made.members(variable.type)
        for mark in (NON_READABLE, NON_WRITABLE):
            if all(mark in decorations for _, _, decorations in members):
                flags.add(mark)
        readable, writable = NON_READABLE not in flags, NON_WRITABLE not in flags
        found[marks[BINDING]] = "r" * readable + "w" * writable
    assert found == {i: binding.access for i, binding in enumerate(spec(name).bindings)}


@every_variant
def test_push_constants_are_those_of_the_specification(name: str) -> None:
    """Names, types and offsets, in order; behind them the address of a code book."""
    made, kinds = module(name), {"u32": "u32", "f32": "f32", "v2u32": "address"}
    blocks = [v for v in made.variables if v.storage == PUSH_CONSTANT]
    found = [
        (field, kinds[kind], marks[OFFSET])
        for block in blocks
        for field, kind, marks in made.members(block.type)
    ]
    wanted, offset, items = [], 0, spec(name).push
    if weight_type(name).upper() in HAS_CODE_BOOK:
        items = (*items, PushField("address", "code_book"))
    for item in items:
        size = 8 if item.kind == "address" else 4
        offset = -(-offset // size) * size
        wanted.append((item.name, item.kind, offset))
        offset += size
    assert found == wanted
    assert len(items) > len(spec(name).push) or offset == spec(name).push_bytes
    assert offset <= 128


@every_variant
def test_specialisation_constants_are_those_of_the_specification(name: str) -> None:
    """The same ids, and from 1 on the same names."""
    made, constants = module(name), spec(name).constants
    assert sorted(made.spec_ids) == list(range(len(constants)))
    names = [made.names[made.spec_ids[i]].lower() for i in range(1, len(constants))]
    assert names == list(constants[1:])


@every_variant
def test_no_subgroup_size_is_assumed(name: str) -> None:
    """Neither the size nor the masks that depend on it are read anywhere."""
    built_ins = module(name).built_ins
    assert SUBGROUP_SIZE not in built_ins
    assert not {mark for mark in built_ins if SUBGROUP_EQ_MASK <= mark <= SUBGROUP_EQ_MASK + 4}


@every_variant
def test_capabilities_are_those_the_name_promises(name: str) -> None:
    """No 8- or 16-bit memory; float16, 64-bit integers and subgroups only where named."""
    allowed = {SHADER, ADDRESSES}
    with_addresses = name.endswith("+subgroup") and family(name) in DOT_FAMILIES
    if name.endswith("+blocks64") or with_addresses:
        allowed |= {INT64}
    if name.endswith("+blocks64") and family(name) in TILE_FAMILIES:
        allowed |= {SUBGROUP_SHUFFLE}
    if name.endswith(("+half", "+matrix")):
        allowed |= {FLOAT16}
    if name.endswith("+matrix"):
        allowed |= {SUBGROUP, MEMORY_MODEL, COOPERATIVE_MATRIX}
    if name == "prompt_attention+matrix":
        allowed |= {SUBGROUP_SHUFFLE}
    if name.endswith(("+subgroup", "+blocks64")):
        allowed |= {SUBGROUP, SUBGROUP_ARITHMETIC}
    assert module(name).capabilities <= allowed


@every_variant
def test_loads_by_address_are_wide_and_aligned(name: str) -> None:
    """Weights come 16 bytes at a time; words only for biases, gains, scales of types in planes.

    The shaders reach memory through one function per width, so a width that is not allowed here
    occurs nowhere in the module. How often each is called is what test_bytes_loaded.py counts.
    """
    loads = {access for access in module(name).accesses if access.opcode == LOAD}
    if family(name) in DOT_FAMILIES:
        wide = Access(LOAD, "v2u64" if name.endswith("+blocks64") else "v4u32", 16)
        words = family(name) != "embed" or weight_type(name) not in TYPES_WITHOUT_PLANES
        assert loads == ({wide, WORD_LOAD} if words else {wide})
    elif family(name) in TILE_FAMILIES:
        wide = Access(LOAD, "v2u64" if name.endswith("+blocks64") else "v4u32", 16)
        assert loads == {wide, WORD_LOAD}
    elif family(name) == "router_topk":
        assert loads == {ENTRY_LOAD, WORD_LOAD}
    elif family(name) in ("expert_tiles", "find_experts"):
        assert loads == {ENTRY_LOAD}
    elif family(name) == "rms_norm":
        assert loads == {WORD_LOAD}
    elif family(name) == "norm_residual":
        assert loads == {Access(LOAD, "v4u32", 16), WORD_LOAD}  # of gains, of the scale
    elif family(name) in ATTENTION_FAMILIES:
        assert loads == {Access(LOAD, "v4u32", 16), ENTRY_LOAD, WORD_LOAD}  # of RoPE, quants
    elif family(name) in RECURRENT_FAMILIES | {"attention_combine", "gate_heads"}:
        assert loads == {WORD_LOAD}
    elif family(name) in APPENDING_FAMILIES:
        assert loads == {ENTRY_LOAD, WORD_LOAD}
    elif family(name) == "prompt_attention":
        wide = Access(LOAD, "v2u64" if name.endswith("+blocks64") else "v4u32", 16)
        quants = Access(LOAD, "u64", 8) if name.endswith("+blocks64") else ENTRY_LOAD
        assert loads == {wide, quants, WORD_LOAD}  # of sinks, and of scales: a word
    elif family(name) in ("read_words", "gather", "bring_experts", "join_rows"):
        assert loads == {Access(LOAD, "v4u32", 16)}
    else:
        assert not loads


def tile_constants(tile: Tile) -> list[int]:
    others = {"dots", "required_size"}
    return [number for name, number in tile._asdict().items() if name not in others]


def constants_of(name: str, tuning: Tuning) -> list[list[int]]:
    """The specialisation constants a tuning gives a variant; several where shapes decide too."""
    size, kind = tuning.workgroup_size, family(name)
    if kind in TILE_FAMILIES:
        return [tile_constants(tuning.tile)]
    if kind.startswith("expert_gate_up"):
        return [[size, max(1, tuning.rows // 2), 0], [size, tuning.rows, 1], [size, tuning.rows, 2]]
    if kind in DOT_FAMILIES - {"embed"}:
        return [[size, tuning.rows]]
    if kind == "attention_combine":
        return [[size, 512, 128]]
    if kind == "expert_tiles":
        return [[128, MAX_EXPERTS]]
    if kind == "router_topk":
        return [[size, MAX_EXPERTS, MAX_EXPERTS]]
    return [[size]]


@every_variant
def test_shared_memory_of_every_launch_that_is_allowed(name: str) -> None:
    """The largest of each width, as `vkmoe tune` may try them and a file may ask for them."""
    kind, suffix = family(name), name.partition("+")[2]
    if kind not in get_args(MatvecFamily) or suffix.startswith("blocks"):
        return
    tuning = Tuning("lanes", 64, 4, bool(suffix))
    tried = kernel_class(cast(MatvecFamily, kind), weight_type(name).upper(), 2048, 2048)
    info = replace(AMD, limits=replace(AMD.limits, max_workgroup_invocations=1024,
                                       max_workgroup_size=(1024, 1024, 64)))  # fmt: skip
    sizes = [Launch(size, rows) for size in (32, 64, 128, 256) for rows in range(1, 17)]
    allowed = [launch for launch in sizes if tuning.allows(tried, launch, info)]
    assert {launch.workgroup_size for launch in allowed} == {32, 64, 128, 256}
    for launch in allowed:
        spread = replace(tuning, workgroup_size=launch.workgroup_size, rows=launch.rows)
        for constants in constants_of(name, spread):
            assert module(name).shared_bytes(constants) <= SHARED_LIMIT, launch


@every_variant
def test_shared_memory_of_the_default_tunings(name: str) -> None:
    made, kind = module(name), family(name)
    if kind in ATTENTION_FAMILIES | {"prompt_attention"}:
        return  # their constants follow from the model's heads: next tests
    for tuning in DEFAULT_TUNINGS:
        suffix = name[name.index("+") :] if "+" in name else ""
        if kind in DOT_FAMILIES - {"embed"} and suffix != tuning.dot_suffix:
            continue
        if kind in TILE_FAMILIES and suffix != tuning.tile_suffix:
            continue
        for constants in constants_of(name, tuning):
            assert made.shared_bytes(constants) <= SHARED_LIMIT, (tuning, constants)


def book_bytes(name: str) -> int:
    """What the code book of a variant's weights takes, but those of 16 words."""
    books, places = code_books()
    ends = [*sorted({*places.values()}), books.nbytes]
    begin = places.get(weight_type(name).upper(), books.nbytes)
    return min((end for end in ends if end > begin), default=begin) - begin


@pytest.mark.parametrize("name", [name for name in NAMES if family(name) in TILE_FAMILIES])
def test_shared_memory_of_tiles(name: str) -> None:
    """As the host counts it, for the shapes that GPUs get; f16 takes less."""
    if "+blocks" in name or "+matrix" in name:
        return
    book = book_bytes(name)
    assert book <= LARGEST_BYTES
    for size, lane_dots in itertools.product((64, 128), (4, 8)):
        sums = Tile(size, size, lane_dots, 4).shared_bytes - LARGEST_BYTES
        found = module(name).shared_bytes([size, lane_dots, 4]) - book
        assert found <= 64 + sums * (0.7 if name.endswith("+half") else 1.0)
        assert name.endswith("+half") or found >= sums


# What GPUs get that have matrix units, and CPUs.
MATRIX_TILES = (
    Tile(256, 256, 64, 32, 16, 16, 16, 32, 1),
    Tile(128, 128, 16, 32, 8, 16, 16, 16),
    Tile(128, 128, 16, 16, 8, 8, 16, 8),
    Tile(32, 32, 8, 16, 8, 8, 8, 8, 1),
)


@every_variant
def test_shared_memory_of_tiles_for_matrix_units(name: str) -> None:
    """As the host counts it, besides large code books."""
    if not name.endswith("+matrix") or family(name) not in TILE_FAMILIES:
        return
    for tile in MATRIX_TILES:
        sums = tile.shared_bytes - LARGEST_BYTES
        found = module(name).shared_bytes(tile_constants(tile)) - book_bytes(name)
        assert sums <= found <= sums + 64


CACHES = (both("f16"), both("f32"), both("q8_0"), KvTypes("q8_0", "f32"), KvTypes("q4_0", "q5_1"))


@pytest.mark.parametrize("name", [name for name in NAMES if family(name) == "attention"])
@pytest.mark.parametrize("tuning", DEFAULT_TUNINGS, ids=str)
@pytest.mark.parametrize("kv_types", CACHES, ids=str)
def test_shared_memory_of_attention(name: str, tuning: Tuning, kv_types: KvTypes) -> None:
    """As the host counts it, and within the limit, for the shapes of real models."""
    shapes = (
        (32, 4, 128),
        (16, 16, 128),
        (64, 4, 64),
        (8, 1, 256),
        (64, 8, 64),
        (40, 1, 80),
        (8, 2, 512),
        (16, 2, 512),
    )
    for n_heads, n_kv_heads, head_dim in shapes:
        shape = AttentionShape(n_heads, n_kv_heads, head_dim, head_dim, 4096, "neox", "per_head",
                               1e-6, 1.0, kv_types)  # fmt: skip
        split = choose_split(shape, tuning)
        found = module(name).shared_bytes([
            split.workgroup_size, head_dim, n_heads, n_kv_heads, head_dim, 0, 1, split.n_splits,
            split.team_lanes, split.step_positions, split.workgroup_heads,
            *type_numbers(shape).values()])  # fmt: skip
        assert found <= split.shared_bytes(shape) <= SHARED_LIMIT


@pytest.mark.parametrize("name", [name for name in NAMES if family(name) == "latent_attention"])
@pytest.mark.parametrize("tuning", DEFAULT_TUNINGS, ids=str)
@pytest.mark.parametrize("kv_type", KV_NUMBERS)
def test_shared_memory_of_latent_attention(name: str, tuning: Tuning, kv_type: KvType) -> None:
    """As the host counts it, for the rows of DeepSeek's models and for narrow subgroups."""
    for n_heads, kv_rank, rope_dim in ((16, 512, 64), (128, 512, 64), (5, 96, 32)):
        shape = LatentShape(n_heads, kv_rank, rope_dim, 128, 4096, 1e-6, 1.0, kv_type)
        for subgroup_size in {tuning.subgroup_size, 4, 64}:
            split = choose_split(shape, replace(tuning, subgroup_size=subgroup_size))
            found = module(name).shared_bytes([
                split.workgroup_size, kv_rank, rope_dim, 128, 1, split.n_splits,
                split.team_lanes, split.step_positions, split.workgroup_heads,
                KV_NUMBERS[kv_type]])  # fmt: skip
            assert found <= split.shared_bytes(shape) <= SHARED_LIMIT


@pytest.mark.parametrize("name", [name for name in NAMES if family(name) == "prompt_attention"])
@pytest.mark.parametrize("kv_types", CACHES, ids=str)
def test_shared_memory_of_prompt_attention(name: str, kv_types: KvTypes) -> None:
    """Of every width: the widest tiles, and the rows that leave fewest columns a workgroup."""
    on_cpu, on_gpu = DEFAULT_TUNINGS[1:3]
    on_units = [replace(on_gpu, matrix_tile=tile) for tile in MATRIX_TILES]
    tunings = {"": [on_gpu], on_cpu.walk_suffix: [on_cpu], "+matrix": on_units}
    shapes: list[AttentionShape | LatentShape]
    shapes = [AttentionShape(16, 4, dim, dim, 4096, "neox", "none", 1e-6, 1.0, kv_types)
               for dim in (8, 64, 96, 128, 136, 256, 512)]  # fmt: skip
    shapes += [LatentShape(16, rank, 64, 128, 4096, 1e-6, 1.0, kv_types.values)
               for rank in (8, 512, 1024)]  # fmt: skip
    suffix = name.removeprefix("prompt_attention")
    for shape, tuning in itertools.product(shapes, tunings[suffix]):
        tiling = choose_tiling(shape, tuning)
        if tiling.suffix != suffix:
            continue  # rows that matrix units do not take
        constants = [
            tiling.workgroup_size,
            shape.row_dim,
            shape.value_dim,
            16,
            4,
            tiling.workgroup_heads,
            *type_numbers(shape).values(),
            0,
            *(tiling.matrix_rows, tiling.matrix_columns, tiling.matrix_depth),
            tiling.subgroup_size,
        ]
        found = module(name).shared_bytes(constants)
        if suffix == "+matrix":
            assert tuning.matrix_tile is not None
            most = max(UNITS_SHARED_BYTES, tuning.matrix_tile.shared_bytes)
            assert found <= tiling.shared_bytes(shape) + 64 and tiling.shared_bytes(shape) <= most
        else:
            assert found <= SHARED_LIMIT, tiling


def test_the_reader_sees_what_is_there() -> None:
    """The checks above mean something only if the reader finds stores, loads and shared memory."""
    attention = module("attention")
    assert {access.opcode for access in attention.accesses} == {LOAD, STORE}
    assert any(v.storage == STORAGE_BUFFER for v in attention.variables)
    assert PHYSICAL in {item.words[1] for item in attention.types.values() if item.opcode == 32}
    plain = module("matvec.q4_k")
    # sum_scratch of the rows and the norm, reduce_scratch.
    assert plain.shared_bytes([64, 4]) == 4 * 5 * 64 + 4 * 256
    assert plain.shared_bytes([128, 2]) == 4 * 3 * 128 + 4 * 256
