"""The study's kernels: which ones there are, and their compiled shaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.compile_shaders import Variant, with_free_accesses
from vkmoe.gpu.kernels import Binding, KernelSpec, PushField
from vkmoe.kernels.experts.operations import EXPERT_GATE_UP
from vkmoe.kernels.launches import MatvecFamily
from vkmoe.kernels.matvec.operations import MATVEC

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KINDS = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K")
# The 8 used experts of Qwen3-30B-A3B, and a dense matrix: rows of weights, columns.
SHAPES: Mapping[MatvecFamily, tuple[KernelSpec, int, int]] = {
    "expert_gate_up": (EXPERT_GATE_UP, 8 * 2 * 768, 2048),
    "matvec": (MATVEC, 4096, 4096),
}
QUANTISE = KernelSpec(
    "quantise",
    (Binding("r", "x"), Binding("w", "words")),
    (PushField("u32", "n_blocks"),),
    ("workgroup_size",),
)


def compile_into(out: Path) -> Callable[[str], bytes]:
    """Compile the study's kernels; returns what reads one by its variant's name."""
    for kind in KINDS:
        for name in SHAPES:  # as "+subgroup", which GPUs take
            path = out / f"{name}.{kind.lower()}+subgroup.spv"
            defines = {f"TYPE_{kind}": "1", "USE_SUBGROUP": "1", "INT64": "1"}
            Variant(path.stem, f"{name}.comp", defines).compile(ROOT / "shaders", path, [HERE])
    Variant("quantise", "quantise.comp", {}).compile(HERE, out / "quantise.spv")
    return lambda variant: (out / f"{variant}.spv").read_bytes()


def compile_tile(kind: str, out: Path, defines: Mapping[str, str] | None = None) -> bytes:
    """Compile the kernel of tiles of a type, which multiplies 8-bit numbers on matrix units."""
    path = out / f"matmul.{kind.lower()}.spv"
    given = {f"TYPE_{kind}": "1", "MATRIX_TILES": "1"} | dict(defines or {})
    Variant(path.stem, "matmul.comp", given).compile(ROOT / "shaders", path, [HERE])
    return with_free_accesses(path.read_bytes())
