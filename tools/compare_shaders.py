"""Compares our shaders that multiply prompts on matrix units with llama.cpp's, as compiled.

    python -m tools.compare_shaders --gpu navi31               # on its driver, without the GPU
    python -m tools.compare_shaders --gpu anv-bmg --type q4_k
    python -m tools.compare_shaders --gpu navi31 gfx1150 --record

Both sides are compiled by the GPU's driver: ours in the tile that vkmoe chooses there, llama.cpp's
in the largest that it allows (llama_cpp_matmul.py). Where llama.cpp multiplies int8, its shader of
f16 is compared besides. What the main loop does is counted in the machine code and priced by the
formula of assembly/cost.py, which has its sources and what it leaves out. Columns are per 1,000
multiply-adds but for the last three; of the first, matrix, vector and shared add up to cycles, and
the ratio is ours to llama.cpp's. "spilled" is of the whole shader, "spill bytes" of that loop. No
figure is a time: nothing runs. The exit code is 1 where a shader of ours spills.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.assembly import read
from tools.assembly.cost import Work, main_loop_work
from tools.debian import ArchiveError
from tools.gpu_drivers import CANNOT, GPUS, command, folder, is_complete
from tools.kernel_statistics import column
from tools.llama_cpp_matmul import (
    PUSH_BYTES,
    Shader,
    compile_shader,
    compiler,
    matmul_shaders,
    sources,
    why_none,
)
from tools.llama_cpp_shaders import SDIST
from tools.pipelines import Pipeline, pipelines
from vkmoe.errors import VkmoeError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.kernels.tuning import choose_tuning

if TYPE_CHECKING:
    from vkmoe.gpu._native import Executable

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TYPES = ("q4_k", "q6_k", "q8_0", "mxfp4", "iq3_xxs")
# What is compared, the kernel of ours, and what its name has besides for the usual model.
MATRICES = {
    "dense": ("matmul", ()),
    "gate and up": ("expert_matmul_gate_up", ("biased=0", "pass=0", "activation=0")),
    "down": ("expert_matmul_down", ("biased=0",)),
}
OURS, THEIRS = "vkmoe", "llama.cpp"


class Row(NamedTuple):
    """Holds what was found of one shader."""

    type: str
    matrices: str  # a key of MATRICES
    side: str
    factors: str  # what is multiplied: f16 or int8
    lanes: int
    registers: int
    spilled: int
    work: Work

    @property
    def cycles(self) -> float:
        """Return the estimate per 1,000 multiply-adds."""
        return self.work.per_thousand(self.work.cycles)


class Comparison(NamedTuple):
    """Holds what was found on a GPU; without rows of a side that multiplies no matrices there."""

    gpu: str
    device: str
    driver: str
    notes: list[str]
    rows: list[Row]


# ----- on the driver -----


def compare(gpu: str, types: Sequence[str], assembly: Path | None = None) -> Comparison:
    """Compile both sides on the device at hand, which is called `gpu`; writes their assembly.

    Raises VkmoeError, CalledProcessError, ArchiveError, and ValueError as `main_loop_work`.
    """
    with Device(statistics=True) as device:
        info = device.info
        driver = f"{info.driver_name} {info.driver_info}"
        notes = list(_notes(info))
        kinds = types if choose_tuning(info).matrix_tile is not None else ()
        rows = [row for kind in kinds for row in _rows(device, kind, assembly)]
    return Comparison(gpu, info.name, driver, notes, rows)


def _notes(info: DeviceInfo) -> Iterator[str]:
    """Say which side multiplies no matrices there, and why."""
    if choose_tuning(info).matrix_tile is None:
        none = "the driver offers no matrices of f16"
        why = "they do not suit its tiles" if info.half_shapes else none
        yield f"{OURS} multiplies no matrices there: {why}"
    if (reason := why_none(info)) is not None:
        yield f"{THEIRS} multiplies no matrices there: {reason}"


def _rows(device: Device, kind: str, assembly: Path | None) -> Iterator[Row]:
    """Compile a type's shaders of both sides, ours first."""
    own = pipelines(choose_tuning(device.info), f".{kind}+matrix")
    theirs = {experts: list(_theirs(device, kind, experts)) for experts in (False, True)}
    for matrices, (kernel, words) in MATRICES.items():
        (ours,) = (p for p in own if p.kernel == kernel and {*words} <= set(p.name.split()))
        compiled = _compile(device, ours, spirv_words(ours.variant))
        yield _row(compiled, (kind, matrices, OURS, "f16"), assembly)
        for factors, other in theirs[matrices != "dense"]:
            yield _row(other, (kind, matrices, THEIRS, factors), assembly)


def _theirs(device: Device, kind: str, experts: bool) -> Iterator[tuple[str, Executable]]:
    shaders = matmul_shaders(device.info, kind, experts) if why_none(device.info) is None else ()
    for shader in shaders:
        spirv = compile_shader(shader, sources(), compiler())
        yield shader.factors, _compile(device, _pipeline(shader), spirv)


def _pipeline(shader: Shader) -> Pipeline:
    constants = tuple(shader.constants)
    return Pipeline(
        "", shader.source, constants, shader.n_bindings, PUSH_BYTES, shader.subgroup_size
    )


def _compile(device: Device, pipeline: Pipeline, spirv: bytes) -> Executable:
    kernel = device.native.kernel(
        spirv,
        [device.native.tensor(1)] * pipeline.n_bindings,
        pipeline.constants,
        pipeline.push_bytes,
        pipeline.variant,
        pipeline.subgroup_size,
        True,
    )
    (executable,) = kernel.executables()  # compute pipelines have one
    return executable


def _row(found: Executable, names: tuple[str, str, str, str], assembly: Path | None) -> Row:
    """Count what a shader does. Raises ValueError with its names, as `main_loop_work`."""
    lanes, statistics = found.subgroup_size, found.statistics
    text = "".join(part for key, part in found.texts.items() if "assembly" in key.lower())
    if assembly is not None:
        path = assembly / f"{' '.join(names).replace(' ', '_')}.s"
        path.write_text(text, encoding="utf-8")
    try:
        work = main_loop_work(read(text, lanes), lanes)
    except ValueError as reason:
        raise ValueError(f"{' '.join(names)}: {reason}") from reason
    spilled = sum(column(statistics, name) or 0 for name in ("spilled", "scratch"))
    return Row(*names, lanes, column(statistics, "registers") or 0, spilled, work)


# ----- from here -----


def compared_on(gpu: str, types: Sequence[str] = TYPES, assembly: Path | None = None) -> Comparison:
    """Compare in a process on the driver of a GPU, past its cache.

    Raises RuntimeError with what that process wrote where it fails.
    """
    program = [sys.executable, "-m", "tools.compare_shaders", "--here", gpu, "--type", *types]
    if assembly is not None:
        (assembly / gpu).mkdir(parents=True, exist_ok=True)
        program += ["--assembly", str((assembly / gpu).resolve())]
    words, environment = command(folder(), gpu, program)
    environment |= {"MESA_SHADER_CACHE_DISABLE": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{gpu}: exit code {done.returncode}\n{done.stderr}")
    return _from_json(json.loads(done.stdout))


def _to_json(found: Comparison) -> dict[str, Any]:
    rows = [row._asdict() | {"work": row.work._asdict()} for row in found.rows]
    return found._asdict() | {"rows": rows}


def _from_json(found: dict[str, Any]) -> Comparison:
    rows = [Row(**row | {"work": Work(**row["work"])}) for row in found["rows"]]
    return Comparison(**found | {"rows": rows})


def ratios(rows: Sequence[Row]) -> Iterator[tuple[Row, float | None]]:
    """Yield each row, and how our cycles compare with it where it is llama.cpp's."""
    ours = {(row.type, row.matrices): row.cycles for row in rows if row.side == OURS}
    for row in rows:
        is_theirs = row.side == THEIRS
        yield row, ours[row.type, row.matrices] / row.cycles if is_theirs else None


# ----- for people -----

HEAD = (
    f"{'':37}  ratio cycles matrix vector shared | matrix vector shared shared  loads   load"
    f"   spill          lanes regs spilled\n{'':37}         (cycles of parts)          |"
    f"  instr  instr  instr  bytes         bytes   bytes barriers"
)


def table(found: Comparison) -> str:
    """Return what was found for people."""
    lines = [f"{found.gpu}: {found.device}, {found.driver}", *found.notes]
    if found.rows:
        lines.append(HEAD)
    lines += [_line(row, ratio) for row, ratio in ratios(found.rows)]
    if inner := [row for row in found.rows if row.work.inner_loops]:
        names = ", ".join(f"{row.type} {row.matrices} of {row.side}" for row in inner)
        lines.append(f"with loops inside the main loop, passed once in these figures: {names}")
    return "\n".join(lines)


def _line(row: Row, ratio: float | None) -> str:
    work, thousand = row.work, row.work.per_thousand
    name = f"{row.type:8}{row.matrices:12}{row.side} {row.factors}"
    shown = f"{ratio:6.2f}" if ratio else f"{'':6}"
    parts = work.matrix_cycles, work.vector_cycles, work.shared_cycles
    cycles = " ".join(f"{thousand(number):6.2f}" for number in (work.cycles, *parts))
    counts = work.matrix, work.vector, work.shared, work.shared_bytes, work.loads, work.load_bytes
    counted = " ".join(f"{thousand(number):6.2f}" for number in counts)
    rest = f"{thousand(work.spill_bytes):7.1f} {thousand(work.barriers):8.3f}"
    whole = f"{row.lanes:5} {row.registers:4} {row.spilled:7}"
    return f"{name:37} {shown} {cycles} | {counted} {rest} {whole}"


def record(found: Sequence[Comparison]) -> Path:
    """Write the figures to bench/results; returns the file."""
    now = datetime.datetime.now(datetime.UTC)
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    card = {
        "date": now.isoformat(timespec="seconds"),
        "command": f"python -m tools.compare_shaders {' '.join(sys.argv[1:])}",
        "drivers": {one.gpu: f"{one.device}, {one.driver}" for one in found},
        "llama.cpp": SDIST,
        "commit": done.stdout.strip(),
    }
    results = [
        {
            "gpu": one.gpu,
            "notes": one.notes,
            "rows": [
                row._asdict()
                | {"cycles": round(row.cycles, 3), "ratio": ratio and round(ratio, 3)}
                | {"work": row.work._asdict()}
                for row, ratio in ratios(one.rows)
            ],
        }
        for one in found
    ]
    path = RESULTS / f"{now:%Y-%m-%d}-compare_shaders-compilers.json"
    text = json.dumps({"benchmark": "compare_shaders", "card": card, "results": results}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", choices=GPUS, nargs="+")
    where.add_argument("--here", metavar="NAME", help="the device at hand, as JSON")
    parser.add_argument("--type", choices=TYPES, nargs="+", default=TYPES)
    parser.add_argument("--assembly", type=Path, metavar="FOLDER", help="write it there")
    parser.add_argument("--record", action="store_true", help="write to bench/results")
    return parser.parse_args()


def main() -> int:
    """Run the command line; returns the exit code."""
    options = _arguments()
    if options.gpu and not is_complete(folder()):
        print("no GPU drivers here: tools/fetch_gpu_drivers gets them", file=sys.stderr)
        return CANNOT
    try:
        sources(), compiler()
        if options.here:
            print(json.dumps(_to_json(compare(options.here, options.type, options.assembly))))
            return 0
        found = []
        for gpu in options.gpu:
            found.append(compared_on(gpu, options.type, options.assembly))
            print(table(found[-1]), flush=True)
    except (ArchiveError, subprocess.CalledProcessError) as reason:
        print(f"llama.cpp's shaders cannot be had or compiled: {reason}", file=sys.stderr)
        return CANNOT
    except (VkmoeError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.record:
        print(f"recorded: {record(found).relative_to(ROOT)}")
    return int(any(row.spilled for one in found for row in one.rows if row.side == OURS))


if __name__ == "__main__":
    sys.exit(main())
