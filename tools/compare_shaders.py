"""Holds vkmoe's kernels for one token beside llama.cpp's, through the same compilers, by hand.

    python -m tools.compare_shaders                      # all GPUs; needs tools/fetch_gpu_drivers
    python -m tools.compare_shaders --gpu navi31 --type Q4_K --shape head
    python -m tools.compare_shaders --save before.json       # and later, of another tree:
    python -m tools.compare_shaders --before before.json --save after.json
    python -m tools.compare_shaders --before before.json --load after.json --markdown
    PYTHONPATH=OTHER:THIS python -m tools.compare_shaders    # in OTHER: vkmoe of another tree

Nothing runs: drivers of GPUs that are not here compile, and tools/assembly counts. Shapes are those
of Qwen3-30B-A3B. Columns:
    ALU/w    arithmetic instructions per weight in the main loop ("?": a lane reads fewer bytes than
             its weights have, so the loop is not what this tool takes it for)
    rounds   dependent waits for memory of a wave from start to end; behind the "+" those for scalar
             loads (parameters, descriptors, addresses; Intel: spilled registers), which mostly hit
             a cache
    loads    loads of weights of a wave in flight at once
    KiB      bytes of weights in flight per compute unit as far as registers allow: what lanes ask
             for, bytes that lanes share counted once
    grid     the same with the waves that the matrix has for each unit
    need     twice bandwidth x 600 ns / units of a card with this GPU (Little's law, with reserve)
    waves    that fit on a unit; regs ("!": spilled, or arrays in memory), code (bytes) and cycles
             (of one wave, with loops guessed) are what the compiler says
A "*" marks which of its two shaders llama.cpp runs there; its gate and up are two dispatches, its
q, k and v three (here: q). Where its columns are no multiple of what its main loop does in a pass,
a whole pass is counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

from tools import llama_cpp_shaders as llama
from tools.assembly import Question, count, read
from tools.debian import ArchiveError
from tools.gpu_drivers import CANNOT, command, folder, is_complete
from tools.kernel_statistics import column, spills, waves
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import ExpertBlock, ExpertShape, SpanMatrix, expert_down, expert_gate_up
from vkmoe.ops.matvec import Matrix, matvec, matvec_residual
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.quants import TYPES, device_row_bytes

ROUND_TRIP = 600e-9  # seconds, of a load that misses all caches
CHUNK = 32  # weights that a lane of ours does of a row in a pass
LOADED_PARTIALS = 8  # of the norm's, that a lane of ours loads before any loop


@dataclass(frozen=True)
class Card:
    """States what the maker publishes of a card: compute units and bytes per second."""

    name: str
    vendor: str
    units: int
    bandwidth: float
    source: str

    @property
    def need_bytes(self) -> float:
        """Return the bytes that a unit must have in flight."""
        return 2 * self.bandwidth * ROUND_TRIP / self.units


CARDS = {
    "navi31": Card("RX 7900 XTX", "amd", 96, 960e9, "AMD's product page"),
    "navi21": Card("RX 6800 XT", "amd", 72, 512e9, "AMD's product page"),
    "nvk-ampere": Card("RTX 3090", "nvidia", 82, 936e9, "NVIDIA's GA102 whitepaper, appendix A"),
    "anv-dg2": Card("Arc A770 16 GB", "intel", 32, 560e9, "Intel's ARK; a unit is an Xe core"),
}
# name -> rows, columns, used experts; 0: a plain matrix
SHAPES: Mapping[str, tuple[int, int, int]] = {
    "head": (151936, 2048, 0),
    "q k v": (5120, 2048, 0),
    "output": (2048, 4096, 0),
    "gate up": (768, 2048, 8),
    "down": (2048, 768, 8),
}


@dataclass(frozen=True)
class Job:
    """Holds a pipeline to compile, and what is asked of it."""

    gpu: str
    shape: str
    type: str
    code: str  # whose
    spirv: bytes
    constants: tuple[int, ...]
    n_bindings: int
    push_bytes: int
    subgroup_size: int
    workgroup_lanes: int
    n_workgroups: int
    weights_a_pass: float  # of a lane
    all_weights: float  # of a lane
    question: Question


@dataclass(frozen=True)
class Row:
    """Holds a line of the table; figures that a driver does not state are None."""

    gpu: str
    shape: str
    type: str
    code: str
    alu_per_weight: float
    covers: bool
    rounds: int
    scalar_rounds: int
    loads_in_flight: int
    unit_bytes: float
    grid_bytes: float
    need_bytes: float
    registers: int | None
    spills: bool
    waves: int
    code_bytes: int | None
    cycles: int | None


# ----- what is compiled -----


def _ours(gpu: str, tuning: Tuning, shape: str, kind: str) -> Iterator[Job]:
    """Yield vkmoe's kernel for a shape."""
    _, n_columns, n_experts = SHAPES[shape]
    (dispatch,) = _program(tuning, shape, kind).dispatches()
    spec = KERNELS[dispatch.kernel]
    constants = dict(zip(spec.constants, dispatch.constants, strict=True))
    lanes = constants["workgroup_size"]
    dots = constants["rows"] * (2 if shape == "gate up" else 1)
    columns = n_columns * (n_experts if shape == "down" else 1)
    norm = [at for at, binding in enumerate(spec.bindings) if binding.name == "norm_partials"]
    partials = 2048 // tuning.rows
    x, y, z = dispatch.groups
    yield Job(
        *(gpu, shape, kind, "vkmoe", spirv_words(dispatch.variant), dispatch.constants),
        *(len(dispatch.tensors), len(dispatch.push), dispatch.subgroup_size, lanes, x * y * z),
        weights_a_pass=CHUNK * dots,
        all_weights=columns * dots / lanes,
        question=Question(
            main_passes=ceil(columns / (CHUNK * lanes)),
            passes=dict.fromkeys(norm, max(0, ceil(partials / lanes) - LOADED_PARTIALS)),
        ),
    )


def _program(tuning: Tuning, shape: str, kind: str) -> Program:
    """Append the one dispatch that a shape takes, over invented memory."""
    n_rows, n_columns, n_experts = SHAPES[shape]
    program = Program(shape)
    op = OpContext(program, tuning)
    address, width = 1 << 32, 8192
    names = ("x", "y", "hidden", "gained", "partials", "routing")
    x, y, hidden, gained, partials, routing = (TensorRef(name, 1 << 18) for name in names)
    norm = NormInput(partials, width // 4 // tuning.rows, 2048, 1e-6)
    output = NormOutput(hidden, gained, partials, address)
    if n_experts == 0:
        row_bytes = device_row_bytes(kind, n_columns)
        matrix = Matrix(kind, address, n_rows, n_columns, row_bytes)
        if shape == "output":
            matvec_residual(op, matrix, x, output)
        else:
            matvec(op, [matrix], x, y, norm)
        return program
    hidden_columns, expert_rows = 2048, 768
    wide = SpanMatrix(kind, 0, expert_rows, hidden_columns, device_row_bytes(kind, hidden_columns))
    tall = SpanMatrix(kind, 0, hidden_columns, expert_rows, device_row_bytes(kind, expert_rows))
    block = ExpertBlock(ExpertShape(wide, wide, tall, 1 << 24), routing, n_experts)
    if shape == "gate up":
        expert_gate_up(op, block, x, y, norm)
    else:
        expert_down(op, block, x, output)
    return program


def _theirs(gpu: str, shape: str, kind: str) -> Iterator[Job]:
    """Yield llama.cpp's shaders for a shape, with plain activations and in q8_1."""
    n_rows, n_columns, n_experts = SHAPES[shape]
    n_rows = 4096 if shape == "q k v" else n_rows  # q alone
    matrix = llama.Matrix(kind, n_rows, n_columns, n_experts)
    for q8_1 in (False, True)[: 1 if kind == "F16" else 2]:
        shader = llama.choose(CARDS[gpu].vendor, gpu == "navi31", matrix, q8_1)
        code = f"llama.cpp {'q8_1' if q8_1 else 'f32'}{'*' * shader.is_default}"
        yield Job(
            *(gpu, shape, kind, code, llama.spirv(shader).read_bytes(), shader.constants),
            llama.ID_BINDINGS if shader.by_id else llama.BINDINGS,
            llama.PUSH_BYTES,
            shader.subgroup_size,
            shader.lanes,
            ceil(n_rows / shader.n_rows) * max(1, n_experts),
            weights_a_pass=shader.columns_a_pass / shader.lanes * shader.n_rows,
            all_weights=n_columns * shader.n_rows / shader.lanes,
            question=Question(
                weights=llama.WEIGHTS_BINDING,
                main_passes=ceil(n_columns / shader.columns_a_pass),
                unused=llama.OPTIONAL_BINDINGS,
                main_only=True,
            ),
        )


# ----- what comes of it -----


def measure(gpu: str, types: Sequence[str], shapes: Sequence[str]) -> list[Row]:
    """Compile on the device at hand, which is that of `gpu`, and count."""
    with Device(statistics=True) as device:
        tuning = choose_tuning(device.info)
        jobs = [
            job
            for shape in shapes
            for kind in types
            for jobs in (_ours(gpu, tuning, shape, kind), _theirs(gpu, shape, kind))
            for job in jobs
        ]
        return [_row(device, job) for job in jobs]


def _row(device: Device, job: Job) -> Row:
    """Compile one pipeline and count."""
    tensor = device.native.tensor(1, "any")
    kernel = device.native.kernel(
        *(job.spirv, [tensor] * job.n_bindings, job.constants, job.push_bytes, job.code),
        0 if device.info.has_one_subgroup_size else job.subgroup_size,
        True,
    )
    (made,) = kernel.executables()
    text = next(text for name, text in made.texts.items() if "assembly" in name.lower())
    nir = next((text for name, text in made.texts.items() if "NIR" in name), "")
    figures = count(read(text, made.subgroup_size, nir), job.question)
    lane_weights = job.weights_a_pass if figures.has_main_loop else job.all_weights
    kind = TYPES[job.type]
    lane_bytes = lane_weights * kind.block_bytes / kind.block_weights
    share = min(1.0, lane_bytes / figures.weight_bytes)
    card, workgroup_waves = CARDS[job.gpu], ceil(job.workgroup_lanes / made.subgroup_size)
    on_simd = waves(made.statistics, made.subgroup_size, device.info.subgroup_range[0])
    on_unit = _waves_of_unit(card.vendor, made.statistics, on_simd, workgroup_waves)
    wave_bytes = figures.bytes_in_flight * share * made.subgroup_size
    grid_waves = min(float(on_unit), job.n_workgroups * workgroup_waves / card.units)
    return Row(
        *(job.gpu, job.shape, job.type, job.code),
        alu_per_weight=figures.alu / lane_weights,
        covers=figures.weight_bytes >= 0.95 * lane_bytes,
        rounds=figures.rounds,
        scalar_rounds=figures.scalar_rounds,
        loads_in_flight=figures.loads_in_flight,
        unit_bytes=wave_bytes * on_unit,
        grid_bytes=wave_bytes * grid_waves,
        need_bytes=card.need_bytes,
        registers=column(made.statistics, "registers"),
        spills=spills(made.statistics),
        waves=on_unit,
        code_bytes=column(made.statistics, "code"),
        cycles=column(made.statistics, "latency"),
    )


def _waves_of_unit(
    vendor: str, statistics: Mapping[str, float], on_simd: int | None, workgroup_waves: int
) -> int:
    """Return how many waves fit on a compute unit.

    AMD: on each of the two SIMDs of RDNA's. NVIDIA: registers in units of 256 a warp,
    16384 a partition, 48 warps, 16 workgroups and 100 KiB a multiprocessor (CUDA C++ Programming
    Guide, compute capability 8.6; 1 KiB a workgroup is the system's). Intel: 16 vector engines
    of 8 threads a core.
    """
    if on_simd is not None:
        return 2 * on_simd
    if vendor == "intel":
        return 128
    registers = ceil(statistics["Number of GPRs"] * 32 / 256) * 256
    workgroups = min(16, min(48, 16384 // registers * 4) // workgroup_waves)
    return workgroups * workgroup_waves


def on_gpu(gpu: str, types: Sequence[str], shapes: Sequence[str]) -> list[Row]:
    """Do the same in a process on the driver of a GPU. Raises CalledProcessError."""
    chosen = [*("--gpu", gpu), *("--type", *types), *("--shape", *shapes)]
    program = [sys.executable, "-m", "tools.compare_shaders", "--here", *chosen]
    words, environment = command(folder(), gpu, program)
    environment |= {"MESA_SHADER_CACHE_DISABLE": "1"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**row) for row in json.loads(done.stdout)]


# ----- for people -----

HEADS: tuple[str, ...] = (
    "type",
    "code",
    "ALU/w",
    "rounds",
    "loads",
    "KiB",
    "grid",
    "need",
    "regs",
    "waves",
)
HEADS += ("code B", "cycles")


def _cells(row: Row) -> list[str]:
    kib = [f"{n / 1024:.1f}" for n in (row.unit_bytes, row.grid_bytes, row.need_bytes)]
    said = [row.waves, row.code_bytes, row.cycles]
    return [
        *(row.type, row.code, f"{row.alu_per_weight:.2f}{'' if row.covers else '?'}"),
        *(f"{row.rounds}+{row.scalar_rounds}", str(row.loads_in_flight), *kib),
        "" if row.registers is None else f"{row.registers:.0f}{'!' if row.spills else ''}",
        *("" if number is None else f"{number:.0f}" for number in said),
    ]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table for each GPU and shape."""
    for gpu, shape in dict.fromkeys((row.gpu, row.shape) for row in rows):
        here = [row for row in rows if (row.gpu, row.shape) == (gpu, shape)]
        here.sort(key=lambda row: (llama.TYPES.index(row.type), row.code.startswith("llama")))
        n_rows, n_columns, n_experts = SHAPES[shape]
        experts = f" of {n_experts} experts" if n_experts else ""
        yield f"\n{gpu} ({CARDS[gpu].name}): {shape}, {n_rows} x {n_columns}{experts}"
        lines = [HEADS, *map(_cells, here)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            words = zip(line, widths, strict=True)
            yield "  ".join(word.ljust(n) if n > 9 else word.rjust(n) for word, n in words)


CODES = ("vkmoe before", "vkmoe", "llama.cpp f32", "llama.cpp q8_1")


def summaries(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table for each GPU: a line for each type and shape.

    Bold: vkmoe's arithmetic or rounds are above those of llama.cpp's f32, or its bytes below need.
    """
    codes = [code for code in CODES if any(row.code.rstrip("*") == code for row in rows)]
    heads = [f"{figure} {code}" for figure in ("ALU/w", "rounds", "KiB") for code in codes]
    for gpu in dict.fromkeys(row.gpu for row in rows):
        need = CARDS[gpu].need_bytes / 1024
        yield f"\n**{gpu}** ({CARDS[gpu].name}, needs {need:.1f} KiB a unit)\n"
        yield f"| type | shape | {' | '.join(heads)} |"
        yield f"|{'---|' * (2 + len(heads))}"
        here = [row for row in rows if row.gpu == gpu]
        for kind, shape in dict.fromkeys((row.type, row.shape) for row in here):
            found = {r.code.rstrip("*"): r for r in here if (r.type, r.shape) == (kind, shape)}
            cells = _summary_cells([found.get(code) for code in codes], found[CODES[2]])
            yield f"| {kind} | {shape} | {' | '.join(cells)} |"


def _summary_cells(rows: Sequence[Row | None], theirs: Row) -> Iterator[str]:
    """Yield three figures of each of the rows."""
    for name in ("alu_per_weight", "rounds", "unit_bytes"):
        for row in rows:
            if row is None:
                yield ""
                continue
            value = getattr(row, name)
            text = {"rounds": f"{value}", "unit_bytes": f"{value / 1024:.1f}"}.get(
                name, f"{value:.2f}"
            )
            short = (
                value < row.need_bytes if name == "unit_bytes" else value > getattr(theirs, name)
            )
            missed = short and row.code == "vkmoe"
            yield f"**{text}**" if missed else f"{text}{'*' * row.code.endswith('*')}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--type", nargs="+", choices=llama.TYPES, default=list(llama.TYPES))
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the rows there, as JSON")
    parser.add_argument("--before", type=Path, metavar="FILE", help="show vkmoe's saved rows too")
    parser.add_argument("--load", type=Path, metavar="FILE", help="show saved rows, compile none")
    parser.add_argument("--markdown", action="store_true", help="a table per GPU, for a note")
    parser.add_argument("--json", action="store_true", help="print the rows")
    parser.add_argument("--here", action="store_true", help="the device at hand is the GPU")
    return parser.parse_args()


def main() -> int:
    """Run the command line; returns the exit code."""
    options = _arguments()
    if options.here:
        rows = measure(options.gpu[0], options.type, options.shape)
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    if not options.load and not is_complete(folder()):
        print("no GPU drivers here: tools/fetch_gpu_drivers gets them", file=sys.stderr)
        return CANNOT
    try:
        rows = _compiled(options) if options.load is None else _loaded(options)
        before = list(_before(options.before, rows)) if options.before else []
    except (ArchiveError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"nothing to compare: {error}", file=sys.stderr)
        return 1
    if options.save:
        options.save.write_text(json.dumps([asdict(row) for row in rows], indent=0) + "\n")
    rows = [*before, *rows]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print("\n".join((summaries if options.markdown else tables)(rows)))
    return 0


def _compiled(options: argparse.Namespace) -> list[Row]:
    """Compile what was asked; llama.cpp's shaders are in the cache when drivers are started."""
    for gpu in options.gpu:
        for shape in options.shape:
            for kind in options.type:
                list(_theirs(gpu, shape, kind))
    return [row for gpu in options.gpu for row in on_gpu(gpu, options.type, options.shape)]


def _loaded(options: argparse.Namespace) -> list[Row]:
    """Read what was asked from a file. Raises as `_saved`."""
    return [
        row
        for row in _saved(options.load)
        if row.gpu in options.gpu and row.type in options.type and row.shape in options.shape
    ]


def _before(path: Path, now: Sequence[Row]) -> Iterator[Row]:
    """Yield vkmoe's saved rows of what is shown now. Raises as `_saved`."""
    shown = {(row.gpu, row.shape, row.type) for row in now}
    for row in _saved(path):
        if row.code == "vkmoe" and (row.gpu, row.shape, row.type) in shown:
            yield replace(row, code=f"{row.code} before")


def _saved(path: Path) -> list[Row]:
    """Read the rows that `--save` wrote. Raises OSError, ValueError."""
    try:
        return [Row(**row) for row in json.loads(path.read_text())]
    except TypeError as error:
        raise ValueError(f"{path} was saved by another version of this tool ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
