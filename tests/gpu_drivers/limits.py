"""What compilers may make of each family of kernels.

Registers, instructions and weight loads, as one GPU of each maker has them, are held to what they
were when this was last renewed; waves and bytes of code on AMD's GPUs, to numbers that stand here.

python -m tests.gpu_drivers.limits  # renews the stored file
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools.kernel_statistics import Compiled, column, compiled_for

from .conftest import OF_EACH_MAKER

STORED = Path(__file__).with_name("limits.json")
MARGIN = 0.05  # a compiler's own release may cost this; a tenth more is a regression
RDNA, GCN = ("navi31", "navi21", "gfx1150"), ("vega10", "polaris10")
CODE_BYTES = 16 << 10  # half of the instruction cache that units of RDNA and GCN share
OF_BATCH = " of a batch"
ON_UNITS = " on matrix units"
WIDE_HEADS = {"head_dim=256": " of wide heads", "head_dim=512": " of the widest heads"}
BATCH_CODE_BYTES = 26 << 10  # eight columns, each with its sums and its stores: all of one cache


class Least(NamedTuple):
    """The fewest waves of a SIMD unit in RADV's count: of 32 lanes on RDNA, of 64 on GCN."""

    on_rdna: int
    on_gcn: int


# On RDNA 8 for what streams weights, 4 for attention. GCN has half the registers for a lane, and
# what loads first needs as many: 2 waves, which keep 64 KiB in flight on a unit of four SIMDs (at
# least 8 loads of 64 x 16 bytes a wave), seven times what Little's law asks of Vega 64 (484 GB/s
# x 600 ns / 64 units, twice). What stores an expert too needs registers for where it lands. Tiles
# have their reuse in registers: 2 waves on GCN, but for matrices of float32 in tiles of f16.
# Eight columns of a batch fill them all. On matrix units four waves keep a unit busy: some multiply
# while others unpack.
WAVES = {
    "matvec": Least(8, 2),
    "matvec_residual": Least(8, 2),
    "expert_gate_up": Least(8, 2),
    "expert_down": Least(8, 2),
    "expert_gate_up_keep": Least(8, 1),
    "expert_down_keep": Least(6, 1),
    f"matvec{OF_BATCH}": Least(4, 1),
    f"matvec_residual{OF_BATCH}": Least(4, 1),
    "matmul": Least(6, 1),
    "matmul_residual": Least(6, 1),
    "expert_matmul_gate_up": Least(6, 1),
    "expert_matmul_down": Least(6, 1),
    f"matmul{ON_UNITS}": Least(4, 1),
    f"matmul_residual{ON_UNITS}": Least(4, 1),
    f"expert_matmul_gate_up{ON_UNITS}": Least(4, 1),
    f"expert_matmul_down{ON_UNITS}": Least(4, 1),
    "attention": Least(4, 4),
    "attention of wide heads": Least(4, 3),
    "attention of the widest heads": Least(4, 2),  # more have no room in shared memory
    "latent_attention": Least(4, 3),  # 84 of 256 registers for one head: its row is 576 wide
}


class Figures(NamedTuple):
    """The worst of a family, over the constants it is compiled with."""

    registers: int
    instructions: int
    loads: int | None  # of weights in flight at once; None: not counted


def figures(rows: Iterable[Compiled]) -> dict[str, Figures]:
    """The figures of every family."""
    families: dict[str, list[Compiled]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    return {name: _worst(members) for name, members in sorted(families.items())}


def _worst(rows: Iterable[Compiled]) -> Figures:
    numbers = {
        name: [found for row in rows if (found := column(row.statistics, name)) is not None]
        for name in ("registers", "instructions", "loads")
    }
    return Figures(
        max(numbers["registers"]), max(numbers["instructions"]), min(numbers["loads"], default=None)
    )


def worse(found: Mapping[str, Figures], stored: Mapping[str, Figures]) -> Iterator[str]:
    """Every figure that is beyond what is stored, and every family that is in one of both only."""
    for name in sorted(found.keys() ^ stored.keys()):
        yield f"{name}: {'not stored' if name in found else 'stored, but gone'}"
    for name in sorted(found.keys() & stored.keys()):
        now, then = found[name], stored[name]
        for which in ("registers", "instructions"):
            before, after = getattr(then, which), getattr(now, which)
            if after > before * (1 + MARGIN):
                yield f"{name}: {after} {which}, {before} stored"
        if (now.loads or 0) < (then.loads or 0) * (1 - MARGIN):
            yield f"{name}: {now.loads} loads of weights in flight, {then.loads} stored"


def kernel_of(row: Compiled) -> str:
    """The kernel of a family, whatever its type; those of several columns are others."""
    of_batch = OF_BATCH if row.family.endswith(OF_BATCH) else ""
    kernel = row.family.partition(".")[0]
    if kernel == "attention":
        kernel += next((kind for dims, kind in WIDE_HEADS.items() if f" {dims} " in row.name), "")
    return kernel + of_batch + (ON_UNITS if "+matrix" in row.name else "")


def beyond(rows: Iterable[Compiled], gpu: str) -> Iterator[str]:
    """What an AMD GPU has fewer waves of, or more code, than the numbers above."""
    for row in rows:
        kernel, most = kernel_of(row), CODE_BYTES
        if kernel.endswith(OF_BATCH):
            most = BATCH_CODE_BYTES
        if (n_bytes := column(row.statistics, "code") or 0) > most:
            yield f"{row.name}: {n_bytes} bytes of code, at most {most}"
        least = WAVES.get(kernel)
        if least is not None:
            wanted = least.on_gcn if gpu in GCN else least.on_rdna
            if (waves := row.statistics["Subgroups per SIMD"]) < wanted:
                yield f"{row.name}: {waves:.0f} waves, at least {wanted}"


def stored(gpu: str) -> dict[str, Figures]:
    """What is stored for a GPU."""
    of_gpu = json.loads(STORED.read_text(encoding="utf-8"))[gpu]
    return {name: Figures(*numbers) for name, numbers in of_gpu.items()}


def store(every: Mapping[str, Mapping[str, Figures]]) -> None:
    """Store the figures of GPUs, a line for each family."""
    parts = []
    for gpu, found in every.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items()]
        parts.append(f' "{gpu}": {{\n' + ",\n".join(lines) + "\n }")
    STORED.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    store({gpu: figures(compiled_for(gpu)) for gpu in OF_EACH_MAKER})
