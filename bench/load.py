"""Load speed from a warm page cache, by part, and peak memory beside the plan.

python -m bench.load

Each repeat is a fresh process (bench/load_worker.py). The target is 0.8 GB/s, and a peak of at most
300 MB above what the plan says is in host memory (on a CPU or integrated device: all of it).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from bench.worker import WorkerError
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.gpu.device import choose_device, list_devices

ROOT = Path(__file__).resolve().parent.parent
TARGET_GB_PER_S, TARGET_EXTRA_MB = 0.8, 300
CONTEXT = 512
PARTS = {
    "header_s": "the file's header and metadata alone",
    "open_s": "until the first weights are placed: file, device, memory",
    "weights_s": "the weights after the first piece",
    "record_s": "kernels, buffers and programs",
    "total_s": "opening an Engine, all together",
}


def main() -> None:
    """One process to warm up, then the repeats."""
    parser = command_line(__doc__)
    add_model_options(parser)
    options = parser.parse_args()
    info = choose_device(list_devices(), options.device)
    card = describe(info)
    print_card(card)
    model = chosen_model(options)
    print(f"model {model.name}, {model.stat().st_size / 1e6:.0f} MB, context {CONTEXT}\n")
    _load(model, info.index)  # fills the driver's cache of compiled kernels
    loads = [_load(model, info.index) for _ in range(options.repeats)]
    finish("load", card, {"model": model.name, **_results(loads)}, options.record)


def _load(model: Path, device_index: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.load_worker", str(model.resolve())]
    command += ["--device", str(device_index), "--ctx", str(CONTEXT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WorkerError(f"loading failed: {done.stderr.strip()}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _results(loads: list[dict[str, float]]) -> dict[str, Any]:
    speeds = [load["weight_bytes"] / load["total_s"] / 1e9 for load in loads]
    extra = [(load["peak_bytes"] - load["planned_host_bytes"]) / 1e6 for load in loads]
    rows = [
        Row(text, summarise([load[key] for load in loads]), "s", "host_wall")
        for key, text in PARTS.items()
    ]
    size = f"{loads[0]['weight_bytes'] / 1e6:.0f} MB"
    rows.append(
        Row(f"load speed: {size} of weights / all together", summarise(speeds), "GB/s", "host_wall")
    )
    planned = (
        f"peak resident memory above the plan of {loads[0]['planned_host_bytes'] / 1e6:.0f} MB"
    )
    rows.append(Row(planned, summarise(extra), "MB", "count"))
    for row in rows:
        print(row)
    speed, above = rows[-2].value.median, rows[-1].value.high
    met = {"speed": speed >= TARGET_GB_PER_S, "memory": above <= TARGET_EXTRA_MB}
    print(
        f"targets: {TARGET_GB_PER_S} GB/s {'met' if met['speed'] else 'MISSED'}, "
        f"plan + {TARGET_EXTRA_MB} MB {'met' if met['memory'] else 'MISSED'}\n"
    )
    return {"rows": rows, "targets_met": met}


if __name__ == "__main__":
    run_main(main)
