"""Compares kernels of decode with others whose activations are 8-bit numbers in blocks of 32.

    python -m tools.integer_dots.study --record   # on the compilers of GPUs, which need not be here

For each GPU and type of weights it prints by how much the compiler's latency changes, and how long
instructions take beside the bytes of weights, today and with 8-bit activations: 1 is as long. With
s instructions a weight on `lanes` lanes at `clock`, and b bytes a weight, that is

    (s / (lanes * clock)) / (b / bandwidth)

where s is what a lane issues for all its weights, each instruction in one cycle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import RESULTS
from tools.assembly import read
from tools.assembly.flow import find_loops, find_path
from tools.assembly.in_flight import main_loop
from tools.gpu_drivers import CANNOT, command, folder, is_complete
from tools.integer_dots.kernels import KINDS, QUANTISE, ROOT, SHAPES, compile_into
from vkmoe.bench.environment import describe
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.kernels import KernelSpec
from vkmoe.kernels.launches import kernel_class
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.quants import TYPES

CYCLES = ("Latency", "Cycle Count")  # as RADV and ANV call it; NVK states none


class Card(NamedTuple):
    """Holds its maker's figures of a card with the chip of a driver."""

    name: str
    lanes: int  # that multiply and add float32 at once
    gigahertz: float
    gb_per_s: float


CARDS: Mapping[str, Card] = {
    "navi31": Card("RX 7900 XTX", 6144, 2.5, 960),
    "gfx1150": Card("Radeon 890M", 1024, 2.9, 120),
    "anv-dg2": Card("Arc A770", 4096, 2.1, 560),
    "anv-bmg": Card("Arc B580", 2560, 2.67, 456),
    "nvk-ampere": Card("RTX 3090", 10496, 1.695, 936),
}


def _statistics(
    device: Device, spirv: bytes, spec: KernelSpec, numbers: Mapping[str, int]
) -> dict[str, float]:
    """Compile a kernel; returns what the driver states, and what is counted in the assembly."""
    kernel = device.native.kernel(
        spirv,
        [device.native.tensor(1)] * len(spec.bindings),
        [numbers[name] for name in spec.constants],
        spec.push_bytes,
        spec.name,
        numbers["subgroup_size"],
        True,
    )
    (made,) = kernel.executables()
    text = "".join(part for key, part in made.texts.items() if "assembly" in key.lower())
    blocks = read(text, made.subgroup_size, made.texts.get("Final NIR", ""))
    loops = find_loops(blocks)
    loop = main_loop(blocks, loops)
    path = find_path(blocks, loops, loop.header if loop else None)
    alu = {n: sum(i.kind == "alu" for i in blocks[n].instructions) for n in path}
    in_loop = sum(count for n, count in alu.items() if loop and n in loop.blocks)
    counted = {"lanes": made.subgroup_size, "in_loop": in_loop, "rest": sum(alu.values()) - in_loop}
    return made.statistics | counted


def compile_here(read_kernel: Callable[[str], bytes]) -> Iterator[dict[str, Any]]:
    """Compile all kernels on the device at hand, today's and the study's; yields rows."""
    with Device(statistics=True) as device:
        tuning = choose_tuning(device.info)
        for kind in KINDS:
            for family, (spec, n_rows, n_columns) in SHAPES.items():
                launch = tuning.launch(kernel_class(family, kind, n_rows, n_columns))
                rows = launch.rows // (2 if family == "expert_gate_up" else 1)  # of a matrix
                passes = {"walk_rows": rows, "columns": 1, "pass": 0, "activation": 0, "biased": 0}
                numbers = asdict(tuning) | launch._asdict() | {"rows": rows, **passes}
                variant = f"{family}.{kind.lower()}{tuning.dot_suffix}"
                shape = {"kernel": family, "type": kind, "rows": n_rows, "columns": n_columns}
                n_steps = n_columns // (32 * launch.workgroup_size)
                spirvs = {"today": spirv_words(variant), "8-bit": read_kernel(variant)}
                for name, spirv in spirvs.items():
                    found = _statistics(device, spirv, spec, numbers)
                    issued = found["rest"] + n_steps * found["in_loop"]
                    per_weight = issued / (32 * launch.rows * n_steps)
                    yield {**shape, "activations": name, "per_weight": per_weight, **found}
        numbers = {"workgroup_size": tuning.workgroup_size, "subgroup_size": 0}
        found = _statistics(device, read_kernel("quantise"), QUANTISE, numbers)
        yield {"kernel": "quantise", **found}


# ----- for people -----


def _compiled_for(gpu: str) -> dict[str, Any]:
    """Compile in a process on the driver of a GPU. Raises CalledProcessError."""
    words, environment = command(folder(), gpu, [sys.executable, "-m", __spec__.name, "--here"])
    environment |= {"MESA_SHADER_CACHE_DISABLE": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _print_gpu(card: Card, rows: Sequence[Mapping[str, Any]]) -> None:
    pairs = [row for row in rows if "type" in row]
    for pair in zip(pairs[::2], pairs[1::2], strict=True):
        kind, n_columns = pair[0]["type"], pair[0]["columns"]
        weight_bytes = TYPES[kind].row_bytes(n_columns) / n_columns
        in_time = card.lanes * card.gigahertz * weight_bytes / card.gb_per_s  # of that of the bytes
        issued = [row["per_weight"] for row in pair]
        cycles = [row[name] / row["lanes"] for row in pair for name in CYCLES if name in row]
        print(
            f"  {pair[0]['kernel']:14} {kind}: instructions {issued[0]:.2f} -> {issued[1]:.2f},",
            f"beside bytes {issued[0] / in_time:.2f} -> {issued[1] / in_time:.2f}",
            f", latency {100 * (cycles[1] / cycles[0] - 1):+.0f} %" if cycles else "",
        )


def main(options: Sequence[str]) -> int:
    """Run the study; with --record keep its document. Returns the exit code."""
    if options == ["--here"]:
        with tempfile.TemporaryDirectory() as out, Device() as device:
            rows = list(compile_here(compile_into(Path(out))))
            said = {"command": f"python -m {__spec__.name}"}  # `describe` names modules of bench
            print(json.dumps({"card": describe(device.info) | said, "rows": rows}))
        return 0
    if not is_complete(folder()):
        print("no GPU drivers here: tools/fetch_gpu_drivers gets them", file=sys.stderr)
        return CANNOT
    found = {}
    for gpu, card in CARDS.items():
        found[gpu] = _compiled_for(gpu) | {"figures": card._asdict()}
        print(f"{gpu} ({card.name}), {found[gpu]['card']['driver']}")
        _print_gpu(card, found[gpu]["rows"])
    if "--record" in options:
        date = found["navi31"]["card"]["date"][:10]
        content = {"benchmark": "integer_dots", "results": found}
        (RESULTS / f"{date}-integer_dots-compilers.json").write_text(
            json.dumps(content, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
