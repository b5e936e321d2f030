"""Compares prompts' products of f16 on matrix units with others of 8-bit numbers, as compiled.

    python -m tools.integer_dots.matrices --record   # on the compilers of GPUs, which are not here

Both kernels have the tile that vkmoe chooses for a dense matrix. Those of 8 bits are tile.glsl's,
whose activations `quantise.comp` has rounded before. Columns are cycles of the main loop per 1,000
multiply-adds, by the estimate of tools/assembly/cost.py, and what of them is for matrices, vectors
and shared memory. "without mins" leaves out Q4_K's minimums: no product of matrices does less.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.command import RESULTS
from tools.assembly import read
from tools.assembly.cost import main_loop_work
from tools.gpu_drivers import CANNOT, command, folder, is_complete
from tools.integer_dots.kernels import ROOT, compile_tile
from tools.kernel_statistics import column
from tools.pipelines import pipelines
from vkmoe.bench.environment import describe
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.kernels import KERNELS
from vkmoe.kernels.tuning import Tuning, choose_tuning

GPUS = ("navi31", "gfx1150", "anv-dg2", "anv-bmg")
KINDS = ("Q4_K", "Q8_0")
STEP_BLOCKS = 2  # of a step; a loop has each where nothing is loaded ahead


def _kernels(kind: str, out: Path) -> Iterator[tuple[str, bytes]]:
    """Yield what is compared for a type, and its SPIR-V."""
    yield "f16", spirv_words(f"matmul.{kind.lower()}+matrix")
    yield "8 bits", compile_tile(kind, out)
    if kind == "Q4_K":
        yield "without mins", compile_tile(kind, out, {"NO_MINS": "1"})


def compile_here(out: Path) -> Iterator[dict[str, Any]]:
    """Compile all kernels on the device at hand; yields rows. Raises as `main_loop_work`."""
    with Device(statistics=True) as device:
        tuning = choose_tuning(device.info)
        depth = next(s.depth for s in device.info.matrix_shapes if s[3:] == ("s8", "s32"))
        for kind in KINDS:
            for factors, spirv in _kernels(kind, out):
                in_halves = factors == "f16"
                found = _compiled(device, tuning, kind, spirv, None if in_halves else depth)
                yield {"type": kind, "factors": factors, **found}


def _compiled(
    device: Device, tuning: Tuning, kind: str, spirv: bytes, depth: int | None
) -> dict[str, Any]:
    """Compile a kernel, for matrices of another depth than the tile's where it is given."""
    own = pipelines(tuning, f"matmul.{kind.lower()}+matrix")
    (pipeline,) = (one for one in own if one.kernel == "matmul")
    numbers = dict(zip(KERNELS["matmul"].constants, pipeline.constants, strict=True))
    numbers |= {} if depth is None else {"matrix_depth": depth}
    kernel = device.native.kernel(
        spirv,
        [device.native.tensor(1)] * pipeline.n_bindings,
        list(numbers.values()),
        pipeline.push_bytes,
        pipeline.variant,
        pipeline.subgroup_size,
        True,
    )
    (made,) = kernel.executables()
    text = "".join(part for key, part in made.texts.items() if "assembly" in key.lower())
    is_looping = depth is not None and not numbers["loads_ahead"]
    work = main_loop_work(
        read(text, made.subgroup_size), made.subgroup_size, STEP_BLOCKS if is_looping else 1
    )
    spilled = sum(column(made.statistics, name) or 0 for name in ("spilled", "scratch"))
    return {
        "cycles": round(work.per_thousand(work.cycles), 2),
        "matrix": round(work.per_thousand(work.matrix_cycles), 2),
        "vector": round(work.per_thousand(work.vector_cycles), 2),
        "shared": round(work.per_thousand(work.shared_cycles), 2),
        "lanes": made.subgroup_size,
        "registers": column(made.statistics, "registers"),
        "spilled": spilled,
    }


# ----- for people -----


def _compiled_for(gpu: str) -> dict[str, Any]:
    """Compile in a process on the driver of a GPU. Raises CalledProcessError."""
    words, environment = command(folder(), gpu, [sys.executable, "-m", __spec__.name, "--here"])
    environment |= {"MESA_SHADER_CACHE_DISABLE": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(options: Sequence[str]) -> int:
    """Run the study; with --record keep its document. Returns the exit code."""
    if options == ["--here"]:
        with tempfile.TemporaryDirectory() as out, Device() as device:
            said = {"command": f"python -m {__spec__.name}"}  # `describe` names modules of bench
            card = describe(device.info) | said
            print(json.dumps({"card": card, "rows": list(compile_here(Path(out)))}))
        return 0
    if not is_complete(folder()):
        print("no GPU drivers here: tools/fetch_gpu_drivers gets them", file=sys.stderr)
        return CANNOT
    found = {}
    for gpu in GPUS:
        found[gpu] = _compiled_for(gpu)
        print(f"{gpu}, {found[gpu]['card']['driver']}")
        for row in found[gpu]["rows"]:
            print(
                f"  {row['type']:5}{row['factors']:13}{row['cycles']:7.2f} ="
                f"{row['matrix']:6.2f} +{row['vector']:6.2f} +{row['shared']:6.2f}"
                f"  {row['registers']} registers, {row['spilled']} spilled"
            )
    if "--record" in options:
        date = found[GPUS[0]]["card"]["date"][:10]
        content = {"benchmark": "integer_matrices", "results": found}
        (RESULTS / f"{date}-integer_matrices-compilers.json").write_text(
            json.dumps(content, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
