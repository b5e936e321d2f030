"""One load in a process of its own, for bench/load.py: times by part, and the peak of its memory.

Prints one JSON document. The file is read once before, so that it comes from the page cache.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from bench.command import run_main
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gguf_file import open_gguf
from vkmoe.models import read_spec

READ_BYTES = 4 << 20


@dataclass
class _Clock:
    """When the loader first and last reported progress, and the bytes it placed."""

    first: float = 0.0
    last: float = 0.0
    n_bytes: int = 0

    def note(self, done: int, total: int) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.n_bytes = done


def main() -> None:
    """Warm the page cache, open, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--ctx", type=int, required=True)
    options = parser.parse_args()
    _warm(options.model)
    clock = _Clock()
    started = time.perf_counter()
    with open_gguf(options.model) as file:
        read_spec(file)
    opened = time.perf_counter()
    config = EngineConfig(device=options.device, ctx_size=options.ctx)
    with Engine(options.model, config, clock.note) as engine:
        ready = time.perf_counter()
        peak = _peak_bytes()
        plan = engine.plan
        uma = engine.device.info.is_uma
    print(
        json.dumps(
            {
                "header_s": opened - started,
                "open_s": clock.first - opened,
                "weights_s": clock.last - clock.first,
                "record_s": ready - clock.last,
                "total_s": ready - opened,
                "weight_bytes": clock.n_bytes,
                "peak_bytes": peak,
                "planned_host_bytes": plan.total("host") + (plan.total("device") if uma else 0),
            }
        )
    )


def _warm(model: Path) -> None:
    """Read the whole file, without keeping it."""
    buffer = bytearray(READ_BYTES)
    with model.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _peak_bytes() -> int:
    """The most memory this process was ever resident with, mapped file pages included.

    The kernel's VmHWM: getrusage's peak survives exec and may be the parent's.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    run_main(main)
