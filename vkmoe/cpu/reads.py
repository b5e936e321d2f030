"""This module measures how fast the CPU reads memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vkmoe.cpu.device import cache_bytes

HOST_BYTES, N_PASSES = 128 << 20, 5


def host_bytes() -> int:
    """Choose of how many bytes the reading is timed: more than caches hold."""
    return max(HOST_BYTES, 2 * cache_bytes())


def host_bytes_per_second(n_threads: int) -> float:
    """Measure how fast the CPU reads memory, with so many threads: the best of a few passes."""
    return max(host_reads(n_threads, N_PASSES, host_bytes()))


def host_reads(n_threads: int, n_passes: int, n_bytes: int) -> list[float]:
    """Measure bytes per second of threads that together read `n_bytes`, in each of the passes."""
    words = np.zeros(n_bytes // 8, np.uint64)
    words[:] = 1  # pages never written may all be the same one
    parts = np.array_split(words, n_threads)
    speeds = []
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(1 + n_passes):  # the first one starts the threads
            began = time.perf_counter()
            list(threads.map(np.max, parts))  # without the GIL, in whole vectors
            speeds.append(n_bytes / (time.perf_counter() - began))
    return speeds[1:]
