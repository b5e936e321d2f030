"""Which shader llama.cpp multiplies a prompt with on a GPU with matrix units, and how it is made.

The facts are those of its release in llama_cpp_shaders.py: ggml-vulkan.cpp chooses the shader and
the tile (ggml_vk_load_shaders, ggml_vk_mul_mat_q_f16, ggml_vk_mul_mat_id_q_f16) for the drivers of
Mesa, vulkan-shaders-gen.cpp the macros (matmul_shaders). Tiles are the largest that it allows: a
prompt of 512 tokens takes them for dense matrices, and for experts that more than 64 rows chose.
Its sums of f16 are f16 on AMD; ours are f32 everywhere.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.gpu_drivers import folder, whole
from tools.llama_cpp_shaders import SDIST, SHADERS, download_sdist, fetch_glslc
from vkmoe.facts import DeviceInfo, MatrixShape

AMD, INTEL = 0x1002, 0x8086
XE2_LANES = 16  # the least subgroup of Intel's GPUs from Xe2 on; 8 before
RDNA3 = 4  # its number in vk_device_architecture
# Of the types that one shader unpacks by a constant, in ggml.h; others have shaders of their own.
TYPE_NUMBERS = {"q4_k": 12, "q6_k": 14, "q8_0": 8}
IN_INTEGERS = ("q4_k", "q6_k", "q8_0", "mxfp4")  # types with products of int8 on RDNA 3
PUSH_BYTES = 128  # no less than any of these shaders reads
HALF = {"FLOAT_TYPE": "float16_t", "FLOAT_TYPEV2": "f16vec2", "FLOAT_TYPEV4": "f16vec4",
        "FLOAT_TYPEV8": "f16mat2x4"}  # fmt: skip
SUMS = {
    "f16": {"ACC_TYPE": "float16_t", "ACC_TYPEV2": "f16vec2", "ACC_TYPE_VEC4": "f16vec4",
            "ACC_TYPE_MAX": "float16_t(65504.0)"},
    "f32": {"ACC_TYPE": "float", "ACC_TYPEV2": "vec2", "ACC_TYPE_VEC4": "vec4"},
}  # fmt: skip
INPUTS = {
    "f16": {"B_TYPE": "f16mat2x4", "B_TYPE_SCALAR": "float16_t", "B_TYPEV4": "f16vec4"},
    "f32": {"B_TYPE": "mat2x4", "B_TYPE_SCALAR": "float", "B_TYPEV4": "vec4"},
}


class Shader(NamedTuple):
    """Describes a shader that llama.cpp runs."""

    factors: str  # what it multiplies: f16 or int8
    source: str
    macros: Mapping[str, str]
    constants: Sequence[int]
    n_bindings: int
    subgroup_size: int


def why_none(device: DeviceInfo) -> str | None:
    """Say why llama.cpp multiplies no matrices of f16 there; None: it does."""
    if not device.half_shapes:
        return "the driver offers no matrices of f16"
    if device.vendor_id == INTEL and device.subgroup_range[0] < XE2_LANES:
        return "it switches them off before Xe2 (slower on Arc A), and takes integer dots in lanes"
    return None if device.vendor_id in (AMD, INTEL) else "its choice there is not in this tool"


def matmul_shaders(device: DeviceInfo, kind: str, experts: bool) -> list[Shader]:
    """Return what it would take for a weight type, and first what it does take.

    Products of int8 need rows of a prompt in Q8_1, which another shader makes.
    """
    found = [_of_halves(device, kind, experts)]
    if device.vendor_id == AMD and kind in IN_INTEGERS:
        found.insert(0, _of_integers(kind, experts))
    return found


def _of_halves(device: DeviceInfo, kind: str, experts: bool) -> Shader:
    """Return mul_mm.comp; the macros and constants that follow the tile depend on the type."""
    is_amd = device.vendor_id == AMD
    tile = _half_tile(device, device.half_shapes[0], experts)
    # Rows of a prompt are made f16 before, but for experts on AMD.
    inputs = INPUTS["f32" if is_amd and experts else "f16"]
    macros = {**HALF, **SUMS["f16" if is_amd else "f32"], **inputs, **_common(experts)}
    macros["LOAD_VEC_B"] = "8"
    constants = [*tile, 1]  # rows are whole numbers of steps
    if kind in TYPE_NUMBERS:
        macros["MULMAT_QUANT"] = "1"
        constants.append(TYPE_NUMBERS[kind])
    else:
        macros |= {f"DATA_A_{kind.upper()}": "1", "LOAD_VEC_A": "4"}
    return Shader("f16", "mul_mm.comp", macros, constants, 5 if experts else 3, tile[-1])


def _half_tile(device: DeviceInfo, shape: MatrixShape, experts: bool) -> list[int]:
    """Return workgroup size, BM, BN, BK, WM, WN, WMITER, the matrices' sizes, lanes."""
    sizes = [shape.rows, shape.columns, shape.depth]
    if device.vendor_id == AMD:  # experts have no large tile there
        form = [128, 64, 64, 32, 64, 32, 2] if experts else [256, 128, 128, 32, 64, 64, 2]
        return [*form, *sizes, device.subgroup_size]
    if experts:
        return [512, 128, 128, 32, 32, 32, 2, *sizes, 32]
    return [512, 128, 256, 32, 32, 32, 2, *sizes, 16]


def _of_integers(kind: str, experts: bool) -> Shader:
    """Return mul_mmq_cm1.comp, of RDNA 3 in waves of 32."""
    dense = [256, 64, 128] if kind == "q6_k" else [512, 128, 128]
    form = [128, 64, 64] if experts else dense
    macros = {**HALF, **SUMS["f32"], **_common(experts)}
    macros |= {f"DATA_A_{kind.upper()}": "1", "D_TYPE_VEC4": "vec4"}
    constants = [*form, 32, 32, 32, 2, 16, 16, 16, 32, RDNA3]
    return Shader("int8", "mul_mmq_cm1.comp", macros, constants, 5 if experts else 3, 32)


def _common(experts: bool) -> dict[str, str]:
    macros = {"FLOAT16": "1", "COOPMAT": "1", "D_TYPE": "float"}
    return macros | {"MUL_MAT_ID": "1", "MUL_MAT_ID_USE_SUBGROUPS": "1"} if experts else macros


# ----- making them -----


def sources() -> Path:
    """Return the folder of its shaders in the user's cache, downloaded where they are not there.

    Raises CalledProcessError with pip's exit code.
    """
    into = folder().parent / SDIST.replace("==", "-")
    if not into.exists():
        with tempfile.TemporaryDirectory() as scratch, whole(into) as partial:
            partial.mkdir()
            with tarfile.open(download_sdist(Path(scratch))) as archive:
                for member in archive:
                    if member.isfile() and Path(member.name).parent.match(f"*/{SHADERS}"):
                        content = archive.extractfile(member)
                        assert content is not None
                        (partial / Path(member.name).name).write_bytes(content.read())
    return into


def compiler() -> list[str]:
    """Return how to start glslc, fetched into the user's cache. Raises as `fetch_glslc`."""
    return fetch_glslc(folder().parent / "glslc")


def compile_shader(shader: Shader, shaders: Path, glslc: Sequence[str]) -> bytes:
    """Compile as its generator does, which leaves these unoptimised. Raises CalledProcessError."""
    macros = [f"-D{name}={value}" for name, value in shader.macros.items()]
    with tempfile.TemporaryDirectory() as scratch:
        spirv = Path(scratch) / "shader.spv"
        options = ["-fshader-stage=compute", "--target-env=vulkan1.2", "-o", str(spirv), *macros]
        subprocess.run([*glslc, *options, str(shaders / shader.source)], check=True)
        return spirv.read_bytes()
