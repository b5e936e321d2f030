"""Prints what a driver's compiler makes of every kernel that vkmoe runs for real models.

    python -m tools.kernel_statistics --gpu navi31                  # on its driver, without it
    python -m tools.kernel_statistics --only matvec.q4_k            # of the device at hand
    python -m tools.kernel_statistics --gpu anv-dg2 --only attention --assembly FOLDER
    python -m tools.kernel_statistics --gpu nvk-ampere --json       # a list, with all numbers

Columns are sums of what drivers call by different names (COLUMNS); an empty one is not stated.
"registers" are those of a lane (AMD, NVIDIA) or of a thread (Intel), "waves" those of `lanes` that
fit on a SIMD unit (AMD). Latency is a guess of a compiler, which knows neither loops nor memory.
"loads" are those of weights in flight at once, counted in the assembly of kernels that read nothing
else by address. With --kept what was compiled before from the same SPIR-V, by the same driver, is
read from a file beside that driver: what compilers say of the same bytes does not change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.assembly import loads_in_flight, read
from tools.gpu_drivers import CANNOT, GPUS, command, folder, is_complete
from tools.pipelines import MODELS, Pipeline, pipelines
from vkmoe.errors import VkmoeError
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.kernels import KERNELS
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.kv_types import KV_NUMBERS

ROOT = Path(__file__).resolve().parent.parent
# What the kept figures depend on, besides driver and SPIR-V.
COUNTED_BY = (Path(__file__), *sorted((ROOT / "tools" / "assembly").glob("*.py")))
# What a column adds up, in the words of RADV, NVK and ANV.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "registers": ("VGPRs", "Number of GPRs", "Max live registers"),
    "spilled": ("Spilled VGPRs", "Spilled SGPRs", "Spill Count", "Fill Count"),
    "scratch": ("Scratch size", "SLM Size", "Scratch Memory Size"),  # bytes
    "waves": ("Waves per SIMD",),  # our own, of what RADV states
    "shared": ("LDS size", "Workgroup Memory Size"),  # bytes
    "code": ("Code size", "Code Size"),  # bytes
    "instructions": ("Instructions", "Instruction count", "Instruction Count"),
    "latency": ("Latency", "Cycle Count"),
    "loads": ("Weight loads in flight",),  # our own
}
LOADS, WAVES = COLUMNS["loads"][0], COLUMNS["waves"][0]
# Whose loads are counted, by words of the name that must be there and words that must not.
STREAMING, ODD = ("matvec.", "expert_gate_up.", "expert_down."), ("biased=1", "pass=1", "pass=2")


class Compiled(NamedTuple):
    """Holds what a compiler says of a pipeline; `statistics` are under the driver's names."""

    name: str
    family: str  # the variant without what the mapping adds to it: all that may replace each other
    models: Sequence[str]
    subgroup_size: int
    milliseconds: float
    statistics: Mapping[str, float]


def column(statistics: Mapping[str, float], name: str) -> int | None:
    """Return a column of the table; None where the driver does not state it."""
    stated = [statistics[item] for item in COLUMNS[name] if item in statistics]
    return round(sum(stated)) if stated else None


def spills(statistics: Mapping[str, float]) -> bool:
    """Say whether registers did not suffice, or arrays lie in memory."""
    return any(column(statistics, name) for name in ("spilled", "scratch"))


def waves(statistics: Mapping[str, float], lanes: int, least_lanes: int) -> int | None:
    """Return how many waves of so many lanes fit on a SIMD unit; None: the driver does not say.

    RADV alone does, in waves of the fewest lanes that the GPU has: on RDNA one of 64 counts as two
    of 32, on GCN all are of 64 (Mesa's radv_get_max_waves).
    """
    stated = statistics.get("Subgroups per SIMD")
    return None if stated is None else int(stated) * least_lanes // lanes


def compile_all(
    only: str = "", assembly: Path | None = None, kept: Path | None = None
) -> list[Compiled]:
    """Compile the pipelines of the device at hand whose names contain `only`.

    Writes their assembly to a folder where one is given. Those that the file `kept` has are read
    from there, the others added. Raises VkmoeError: on most devices of this machine's own, that
    they keep no statistics.
    """
    known = _read_kept(kept) if kept else {}
    rows: dict[str, Compiled] = {}
    with Device(statistics=True) as device:
        compiling = partial(_compile, device, assembly=assembly)
        for pipeline, models in pipelines(choose_tuning(device.info), only).items():
            key = _digest(pipeline)
            row = Compiled(**known[key]) if key in known else compiling(pipeline, models)
            rows[key] = row._replace(models=models)
    if kept and not rows.keys() <= known.keys():
        others = known if only else {}  # a run of all leaves out what no kernel is any more
        _keep(kept, others | {key: row._asdict() for key, row in rows.items()})
    return list(rows.values())


def _digest(pipeline: Pipeline) -> str:
    """Hash all that a compiler is given, and what counts in its assembly."""
    sums = hashlib.sha256(repr(tuple(pipeline)).encode())
    for part in (spirv_words(pipeline.variant), *_sources()):
        sums.update(hashlib.sha256(part).digest())
    return sums.hexdigest()


@cache
def _sources() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in COUNTED_BY)


def _read_kept(path: Path) -> dict[str, dict[str, Any]]:
    """Read what was kept; nothing where there is no such file, or a damaged one."""
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return {key: Compiled(**row)._asdict() for key, row in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the file anew, whole or not at all: others may read it meanwhile."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(rows, file)
    os.replace(file.name, path)


def _compile(
    device: Device, pipeline: Pipeline, models: Sequence[str], assembly: Path | None
) -> Compiled:
    name, spirv, tensor = pipeline.name, spirv_words(pipeline.variant), device.native.tensor(1)
    is_counted = name.startswith(STREAMING) and not any(word in name for word in ODD)
    started = time.perf_counter()
    kernel = device.native.kernel(
        spirv,
        [tensor] * pipeline.n_bindings,
        pipeline.constants,
        pipeline.push_bytes,
        pipeline.variant,
        pipeline.subgroup_size,
        is_counted or assembly is not None,
    )
    milliseconds = 1e3 * (time.perf_counter() - started)
    (executable,) = kernel.executables()  # compute pipelines have one
    statistics, lanes = executable.statistics, executable.subgroup_size
    if (fit := waves(statistics, lanes, device.info.subgroup_range[0])) is not None:
        statistics |= {WAVES: fit}
    text = "".join(part for key, part in executable.texts.items() if "assembly" in key.lower())
    if assembly is not None:
        (assembly / f"{name.replace(' ', '_')}.s").write_text(text, encoding="utf-8")
    if is_counted:
        blocks = read(text, lanes, executable.texts.get("Final NIR", ""))
        statistics |= {LOADS: loads_in_flight(blocks)}
    family = pipeline.variant.partition("+")[0] + _cache_types(pipeline) + _kind(name)
    return Compiled(name, family, models, lanes, milliseconds, statistics)


def _cache_types(pipeline: Pipeline) -> str:
    """Name the types of KV caches that a pipeline reads or writes, as if they were its variant."""
    constants = dict(zip(KERNELS[pipeline.kernel].constants, pipeline.constants, strict=True))
    of_number = {number: name for name, number in KV_NUMBERS.items()}
    names = [of_number[constants[key]] for key in ("k_type", "v_type") if key in constants]
    return "." + "/".join(dict.fromkeys(names)) if names else ""


def _kind(name: str) -> str:
    """Say what sets a pipeline apart from the others of its variant."""
    words = set(name.split())
    if {"sparse=1", "partial=1"} & words:
        return " of some experts"
    if name.startswith(("attention ", "attention+")) and "head_dim=512" in words:
        return " of the widest heads"
    return " of a batch" if _is_of_batch(name) else ""


def _is_of_batch(name: str) -> bool:
    """Say whether a pipeline multiplies weights with several rows of a batch at once."""
    return any(word.startswith("columns=") and word != "columns=1" for word in name.split())


def compiled_for(
    gpu: str, only: str = "", assembly: Path | None = None, kept: Path | None = None
) -> list[Compiled]:
    """Compile in a process on the driver of a GPU, past its cache; see `compile_all`.

    Raises RuntimeError with what that process wrote where it fails.
    """
    program = [sys.executable, "-m", "tools.kernel_statistics", "--json", "--only", only]
    program += ["--assembly", str(assembly.resolve())] if assembly is not None else []
    program += ["--kept", str(kept.resolve())] if kept is not None else []
    words, environment = command(folder(), gpu, program)
    environment |= {"MESA_SHADER_CACHE_DISABLE": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{gpu}: exit code {done.returncode}\n{done.stderr}")
    return [Compiled(**row) for row in json.loads(done.stdout)]


# ----- for people -----


def _print_table(rows: Sequence[Compiled]) -> None:
    shown = [name for name in COLUMNS if any(column(row.statistics, name) for row in rows)]
    widths = [max(len(name), 6) for name in shown]
    width = max(map(len, (_short(row) for row in rows)), default=0)
    heads = [f"{name:>{n}}" for name, n in zip(shown, widths, strict=True)]
    print(f"{'pipeline':{width}} lanes {' '.join(heads)}    ms  models")
    for row in rows:
        cells = [_cell(row, name, n) for name, n in zip(shown, widths, strict=True)]
        numbers = f"{row.subgroup_size:5} {' '.join(cells)} {row.milliseconds:5.0f}"
        models = "all" if len(row.models) == len(MODELS) else ", ".join(row.models)
        print(f"{_short(row):{width}} {numbers}  {models}")
    spilled = [row for row in rows if spills(row.statistics)]
    seconds = sum(row.milliseconds for row in rows) / 1e3
    print(f"{len(rows)} pipelines in {seconds:.1f} s, {len(spilled)} spill")


def _short(row: Compiled) -> str:
    return row.name.replace("workgroup_size", "group")


def _cell(row: Compiled, name: str, width: int) -> str:
    number = column(row.statistics, name)
    return f"{'' if number is None else number:>{width}}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=GPUS, help="default: the device that vkmoe chooses")
    parser.add_argument("--only", default="", metavar="TEXT", help="pipelines with it in the name")
    parser.add_argument("--assembly", type=Path, metavar="FOLDER", help="write it there")
    parser.add_argument("--json", action="store_true", help="print everything, as a list")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="read and keep figures there")
    return parser.parse_args()


def main() -> int:
    """Run the command line; returns the exit code."""
    options = _arguments()
    only, gpu, assembly = options.only, options.gpu, options.assembly
    if gpu and not is_complete(folder()):
        print("no GPU drivers here: tools/fetch_gpu_drivers gets them", file=sys.stderr)
        return CANNOT
    if assembly is not None:
        assembly.mkdir(parents=True, exist_ok=True)
    try:
        asked = only, assembly, options.kept
        rows = compiled_for(gpu, *asked) if gpu else compile_all(*asked)
    except VkmoeError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
        return 0
    _print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
