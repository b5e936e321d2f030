"""Prints, as JSON, what vkmoe chooses on the one device that the driver at hand shows.

python -m tests.gpu_drivers.choices        # what the tests compare
python -m tests.gpu_drivers.choices --all  # on every GPU, each on its driver: the stored file
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from tools.gpu_drivers import GPUS, command, folder
from vkmoe.bench.shapes import MODELS
from vkmoe.facts import DeltaNetSpec
from vkmoe.gpu.device import Device, Intent
from vkmoe.kernels.attention.shapes import choose_split, shape_of
from vkmoe.kernels.launches import kernel_class
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.kv_types import both

STORED = Path(__file__).with_name("choices.json")
CONTEXT = 4096
QWEN3_30B = {  # its weights, as Q4_K_M has them
    "q/k/v": kernel_class("matvec", "Q4_K", 5120, 2048),
    "router": kernel_class("matvec", "F32", 128, 2048),
    "head": kernel_class("matvec", "Q6_K", 151936, 2048),
    "gate and up": kernel_class("expert_gate_up", "Q4_K", 8 * 768, 2048),
    "down": kernel_class("expert_down", "Q6_K", 2048, 8 * 768),
}


def choices() -> dict[str, Any]:
    """What decides where memory lies, which queues copy, and how kernels are mapped."""
    with Device() as device:
        info = device.info
        tuning = choose_tuning(info)
        found: dict[str, Any] = {
            "type": info.type,
            "subgroups": list(info.subgroup_range),
            "copies on a queue of their own": device.native.has_upload_queue,
            "tuning": asdict(tuning),
        }
        for intent in get_args(Intent):
            buffer = device.allocate(intent, 1 << 20, "choices")
            kind = info.memory_types[buffer.memory_type]
            found[f"{intent} memory"] = sorted(kind.flags)
            buffer.close()
    for what, kernel in QWEN3_30B.items():
        found[f"{what} of qwen3-30b-a3b"] = list(tuning.launch(kernel))
    for name, shapes in MODELS.items():
        for mixer in shapes.mixers:
            if not isinstance(mixer, DeltaNetSpec):
                split = choose_split(shape_of(mixer, CONTEXT, both("f16"), 1e-6), tuning)
                what = f"attention of {name}, heads of {mixer.query_dim}"
                found[what] = list(asdict(split).values())
    return found


def on_gpu(gpu: str) -> dict[str, Any]:
    """The same from a process on the driver of a GPU. Raises CalledProcessError."""
    program = [sys.executable, "-m", "tests.gpu_drivers.choices"]
    words, environment = command(folder(), gpu, program)
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        words, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--all"]:
        every = {gpu: on_gpu(gpu) for gpu in GPUS}
        STORED.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(choices()))
