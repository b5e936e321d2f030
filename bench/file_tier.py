"""A model whose file is larger than the memory that is left for it, beside llama.cpp.

python -m bench.file_tier MODEL.gguf --left 6,10,14 --llama-python LLAMA_VENV/bin/python --record

Memory is locked until so many GB are left. Each side begins anew for each length of prompt, with
nothing of the file in memory. Said are the disk's own speed by direct reads, the seconds of loading
and those from then to the first token, the speed of reading meanwhile, and then tokens per second
and bytes read for each, over tokens of a random text. `by faults` is vkmoe with page faults alone.
Another --device than the CPU keeps experts in a cache. llama.cpp, on the CPU in any case, may not
repack weights: that would copy all of them to memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import command_line, finish, run_main
from bench.speed import numbers
from bench.worker import LLAMA, VKMOE, Worker, own_worker, rival_worker
from vkmoe.bench.environment import describe, print_card
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.devices import choose_device, list_devices
from vkmoe.errors import UsageError

GB, VOCABULARY = 10**9, 1000
BY_FAULTS = f"{VKMOE} by faults"
READ_BYTES, N_READS = 1 << 20, 1024  # for the disk's own speed: about what a matrix has
PIECE_BYTES = 1 << 29  # of memory that is locked at a time


def main() -> None:
    """Measure each side with each length of prompt and each size of memory, in turns."""
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--left", type=numbers, default=(10,), help="GB (default: 10)")
    parser.add_argument("--lengths", type=numbers, default=(6, 64, 512), help="of prompts")
    parser.add_argument("--tokens", type=int, default=64, help="decoded behind each (default: 64)")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    info = choose_device(list_devices(), options.device)
    card, by_cpu = describe(info), not info.is_vulkan
    print_card(card)
    context = max(options.lengths) + options.tokens
    own = ["--device", options.device, *([] if by_cpu else ["--expert-mode", "cache"])]
    sides: dict[str, Callable[[], Worker]] = {
        VKMOE: lambda: own_worker(options.model, context, *own)
    }
    if by_cpu:
        sides[BY_FAULTS] = lambda: own_worker(options.model, context, *own, "--by-faults")
    if options.llama_python:
        python, mapped = options.llama_python, "--mapped"
        sides[LLAMA] = lambda: rival_worker(python, options.model, context, "", mapped)
    rows = []
    for n_left in options.left:
        with all_but(n_left * GB):
            for n in options.lengths:
                speed = disk_speed(options.model)
                print(f"{n_left:3} GB left, the disk reads {speed / GB:4.2f} GB/s", flush=True)
                for name, start in sides.items():
                    row = {"left_gb": n_left, "side": name, "disk_bytes_per_second": speed}
                    row |= _run(start, options.model, n, options)
                    rows.append(row)
                    print(_line(row), flush=True)
    found = {"model": options.model.name, "file_bytes": options.model.stat().st_size, "rows": rows}
    finish("file_tier", card, found, options.record)


def _run(start: Callable[[], Worker], model: Path, n: int, options: Any) -> dict[str, Any]:
    """Load, read a prompt, and decode, from a file that is on the disk alone."""
    with model.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens = np.random.default_rng(n).integers(0, VOCABULARY, n + options.tokens).tolist()
    began = time.perf_counter()
    with start() as worker:
        loaded, before = time.perf_counter() - began, worker.read_bytes()
        seconds = worker.prompt(tokens[:n])
        behind = worker.read_bytes()
        decoding = worker.follow(n, tokens[n:])
        read = worker.read_bytes() - behind
    return {
        "prompt": n,
        "load_seconds": loaded,
        "load_bytes": before,
        "prompt_seconds": seconds,
        "prompt_bytes": behind - before,
        "decode_rate": options.tokens / decoding,
        "decode_bytes": read / options.tokens,
    }


def _line(row: dict[str, Any]) -> str:
    """Say what was measured of a side."""
    seconds, n_bytes = row["prompt_seconds"], row["prompt_bytes"]
    return (
        f"{row['left_gb']:3} GB left, prompt {row['prompt']:4}  {row['side']:16}"
        f"loaded in {row['load_seconds']:5.1f} s, first token {seconds:6.1f} s behind that, "
        f"{n_bytes / GB:5.1f} GB at {n_bytes / GB / seconds:4.2f} GB/s; then "
        f"{row['decode_rate']:5.2f} tok/s, {row['decode_bytes'] / 1e6:5.0f} MB each"
    )


def disk_speed(model: Path) -> float:
    """Measure bytes per second of direct reads, by some threads, at places spread over a file."""
    size, file = model.stat().st_size, os.open(model, os.O_RDONLY | os.O_DIRECT)

    def read(index: int) -> int:
        piece = mmap.mmap(-1, READ_BYTES)  # on a page's border
        first = size * index // N_READS // READ_BYTES * READ_BYTES
        return os.preadv(file, [piece], first)

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        n_bytes = sum(threads.map(read, range(N_READS)))
    os.close(file)
    return n_bytes / (time.perf_counter() - began)


@contextmanager
def all_but(n_bytes: int) -> Iterator[None]:
    """Lock memory until so many bytes are left. Raises UsageError where the system refuses it."""
    libc, held = ctypes.CDLL(None, use_errno=True), []
    try:
        while (more := min(PIECE_BYTES, available_bytes() - n_bytes)) > mmap.PAGESIZE:
            piece = mmap.mmap(-1, more)
            held.append(piece)
            first = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            if libc.mlock(ctypes.c_void_p(first), ctypes.c_size_t(more)) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise UsageError(f"memory cannot be locked: {reason}", "ulimit -l unlimited")
        yield
    finally:
        for piece in held:
            piece.close()


if __name__ == "__main__":
    run_main(main)
