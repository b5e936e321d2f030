"""llama.cpp's Vulkan shaders for one token's matrices: fetched, compiled, and chosen as it does.

Nothing of llama.cpp is kept in the repository. The sources are those in the sdist of
llama-cpp-python (pip), compiled by glslc (Debian) with the defines of vulkan-shaders-gen.cpp; both
go into the user's cache. What ggml-vulkan.cpp chooses for a GPU is written down here again; its
functions are named beside each choice. Owns which release llama.cpp is, and which glslc compiles
it, for bench/gpu_day too. Runs on Python's own library alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.archives import unpack
from tools.debian import fetch
from tools.gpu_drivers import SUITE, folder, started, whole

__all__ = ["BINDINGS", "PUSH_BYTES", "SDIST", "SHADERS", "TYPES", "VENDORED", "Matrix", "Shader",
           "choose", "download_sdist", "fetch_glslc", "spirv"]  # fmt: skip

SDIST = "llama-cpp-python==0.3.36"  # its source distribution holds llama.cpp's
VENDORED, SHADERS = Path("vendor/llama.cpp"), Path("ggml/src/ggml-vulkan/vulkan-shaders")
TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "F16")
WEIGHTS_BINDING, OPTIONAL_BINDINGS = 0, frozenset({3, 4})  # mul_mat_vec_iface.glsl: A; Fuse0, Fuse1
BINDINGS, ID_BINDINGS, PUSH_BYTES = 5, 6, 52  # vk_mat_vec_push_constants
_K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
_REDUCE = {"subgroup": "USE_SUBGROUP_ADD_NO_SHMEM", "hybrid": "USE_SUBGROUP_ADD"}


@dataclass(frozen=True)
class Matrix:
    """Describes what one token multiplies: one matrix, or one of each used expert (`n_experts`)."""

    type: str
    n_rows: int
    n_columns: int
    n_experts: int = 0


@dataclass(frozen=True)
class Shader:
    """Holds a compiled variant's recipe and how it is run."""

    type: str
    by_id: bool
    q8_1: bool  # activations in blocks of 8 bits, integer dot products
    reduction: str
    lanes: int  # of a workgroup
    n_rows: int  # of a workgroup
    subgroup_size: int
    is_default: bool  # whether ggml_vk_should_use_mmvq takes this one of the two

    @property
    def name(self) -> str:
        kind = "mul_mat_vecq" if self.q8_1 else "mul_mat_vec"
        return f"{kind}{'_id' * self.by_id}_{self.type.lower()}_{self.reduction}"

    @property
    def source(self) -> str:
        """Return the file, as process_shaders of vulkan-shaders-gen.cpp chooses it."""
        if self.q8_1:
            return "mul_mat_vecq.comp"
        return f"mul_mat_vec{f'_{self.type.lower()}' * (self.type in _K_TYPES)}.comp"

    @property
    def defines(self) -> Mapping[str, str]:
        """Return the defines, as process_shaders of vulkan-shaders-gen.cpp has them."""
        found = {"FLOAT_TYPE": "float", "FLOAT_TYPEV2": "vec2", "D_TYPE": "float"}
        found |= {f"DATA_A_{self.type}": "1", _REDUCE[self.reduction]: "1"}
        found |= {"MUL_MAT_ID": "1"} if self.by_id else {}
        if self.q8_1:
            return found | {"ACC_TYPE": "float"}
        return found | {"B_TYPE": "float", "B_TYPEV2": "vec2", "B_TYPEV4": "vec4"}

    @property
    def columns_a_pass(self) -> int:
        """Return the columns that a workgroup does in a pass of its main loop."""
        if not self.q8_1 and self.type in _K_TYPES:
            return 16 * self.lanes  # 16 lanes a block of 256
        k_per_iter = 16 if self.type in _K_TYPES else 4 if self.type == "F16" else 8
        return 4 * k_per_iter * self.lanes  # unrolled four times

    @property
    def constants(self) -> tuple[int, int, int]:
        """Return BLOCK_SIZE, NUM_ROWS, NUM_COLS."""
        return self.lanes, self.n_rows, 1


def choose(vendor: str, is_rdna3: bool, matrix: Matrix, q8_1: bool) -> Shader:
    """Choose as llama.cpp does on RDNA 2 and 3 (RADV), NVIDIA from Turing on, or Arc (ANV).

    The size of workgroups is that of ggml_vk_get_dequantize_mul_mat_vec(_id), rows and subgroups
    are those under "mul mat vec" in ggml_vk_load_shaders. `vendor` is amd, nvidia or intel.
    """
    subgroup_size = {"amd": 64, "nvidia": 32, "intel": 8 if q8_1 else 16}[vendor]
    most_rows = 4095 if matrix.type == "Q6_K" else 8192
    large = vendor != "amd" and matrix.n_rows <= most_rows and matrix.n_columns >= 1024
    large &= not (q8_1 and vendor == "intel")
    by_id = matrix.n_experts > 0
    return Shader(
        matrix.type,
        by_id,
        q8_1,
        "hybrid" if large else "subgroup",
        subgroup_size * (4 if large else 1),
        _rows(vendor, matrix.type, q8_1, by_id and is_rdna3),
        subgroup_size,
        q8_1 == _takes_q8_1(vendor, matrix),
    )


def _rows(vendor: str, kind: str, q8_1: bool, static: bool) -> int:
    """Return rm_kq, rm_stdq, rm_iq and their like; `static`: rm_id of RDNA 3."""
    if kind == "F16":
        return 2
    twice = 2 if vendor == "intel" else 1
    if q8_1:
        return 4 if static else {"Q8_0": twice, "MXFP4": 2 * twice}.get(kind, 1)
    return {"Q8_0": twice, "MXFP4": 4}.get(kind, 2)


def _takes_q8_1(vendor: str, matrix: Matrix) -> bool:
    """Say what ggml_vk_should_use_mmvq says for one token of these columns (up to 4096)."""
    if matrix.type == "F16" or vendor == "nvidia" or matrix.n_columns < 2048:
        return False
    return vendor == "intel" or matrix.type not in ("Q6_K", "Q8_0")


# ----- fetching and compiling -----


def spirv(shader: Shader) -> Path:
    """Compile a shader, unless an earlier run did. Raises what `fetch` and subprocess raise."""
    cache = folder().with_name(f"llama-cpp-shaders-{SDIST.partition('==')[2]}")
    made = cache / f"{shader.name}.spv"
    if made.exists():
        return made
    source = _sources(cache / "sources") / shader.source
    defines = [f"-D{key}={value}" for key, value in shader.defines.items()]
    options = ["-fshader-stage=compute", "--target-env=vulkan1.2", "-O", *defines]
    partial = made.with_suffix(".partial")
    compiler = fetch_glslc(cache / "glslc")
    subprocess.run([*compiler, *options, source, "-o", partial], check=True)
    partial.rename(made)
    return made


def _sources(into: Path) -> Path:
    """Fetch the shaders' sources; returns their folder."""
    if not into.exists():
        with whole(into) as partial, tempfile.TemporaryDirectory() as scratch:
            fetched = Path(scratch)
            with tarfile.open(download_sdist(fetched)) as packed:
                wanted = [item for item in packed if SHADERS.name in Path(item.name).parts]
                unpack(packed, fetched, wanted)
            (unpacked,) = fetched.glob(f"*/{VENDORED / SHADERS}")
            shutil.move(unpacked, partial)
    return into


def download_sdist(into: Path) -> Path:
    """Download the source distribution, 77 MB, with pip. Raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    options = ["--no-deps", "--no-binary", SDIST.partition("==")[0], "--dest", str(into)]
    subprocess.run([*pip, *options, SDIST], check=True)
    (archive,) = into.glob("*.tar.gz")
    return archive


def fetch_glslc(into: Path) -> list[str]:
    """Fetch Debian's compiler unless it is there; returns how to start it. Raises as `fetch`."""
    if not into.exists():
        with whole(into) as partial:
            fetch(SUITE, ("glslc",), partial)
    return started(into, into / "usr/bin/glslc")
