"""How fast a vocabulary of 152k tokens with merges opens, and how much memory that takes.

python -m bench.vocabulary [FILE.gguf]

Each repeat is a fresh process: wall-clock seconds from opening the file to a ready tokenizer, and
what that adds to the process's peak memory. Targets: under 1 s and under 100 MB. Without FILE a
vocabulary of Qwen3's size is written to a temporary folder. It needs no Vulkan device.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.command import command_line, finish, run_main
from tools.gguf_writer import write_gguf
from tools.make_synthetic_model import PRESETS, model_metadata
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.gguf_file import TensorInfo
from vkmoe.gpu.device import choose_device, list_devices

PRESET = "qwen3-30b-a3b"
# The kernel's VmHWM, not getrusage: the latter's peak survives exec and would be this process's.
OPEN = """
import sys, time
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf
before, start = peak(), time.perf_counter()
with open_gguf(sys.argv[1]) as file:
    parsed = file.strings("tokenizer.ggml.tokens"), file.strings("tokenizer.ggml.merges")
    read = time.perf_counter()
    del parsed
    Tokenizer.from_file(file)
done = time.perf_counter()
print(read - start, done - read, (peak() - before) / 1000)
"""


def main() -> None:
    """Repeats of one fresh process each."""
    parser = command_line(__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file with a vocabulary")
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or _write_vocabulary(Path(folder))
        opened = [_open(path) for _ in range(options.repeats)]
    columns = list(zip(*opened, strict=True))
    units = {
        "read": ("s", "file opened, tokens and merges read"),
        "tokenizer": ("s", "metadata to a ready tokenizer"),
        "added": ("MB", "peak memory above the bare interpreter"),
    }
    results = {}
    for values, (name, (unit, meaning)) in zip(columns, units.items(), strict=True):
        summary = summarise(values)
        print(Row(meaning, summary, unit, "host_wall" if unit == "s" else "count"))
        results[name] = summary
    finish("vocabulary", card, results, options.record)


def _write_vocabulary(folder: Path) -> Path:
    path = folder / "vocabulary.gguf"
    write_gguf(path, model_metadata(PRESET, PRESETS[PRESET], "q4_k_m"), [], _no_tensor)
    return path


def _no_tensor(tensor: TensorInfo) -> NDArray[np.uint8]:
    raise AssertionError(f"no tensor was asked for, not even {tensor.name}")


def _open(path: Path) -> tuple[float, ...]:
    command = [sys.executable, "-c", OPEN, str(path)]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return tuple(float(word) for word in words)


if __name__ == "__main__":
    run_main(main)
