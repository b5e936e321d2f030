"""What it costs that a GPU and the CPU take turns within a token, for each layer.

python -m bench.chain

A chain as the decoder queues it where the CPU computes experts: in every layer a part that hands
over, a part beside it, and one that joins what the CPU gives back. No kernel computes anything: the
part beside fills memory for about as long as asked, and the CPU runs a program that copies some
bytes, and then waits without rest; so each side keeps one core busy. The same work is measured
alone on either side, in turns, and what the chain takes more than the larger of both is the cost of
taking turns: at most 50 us a layer if all is well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from bench.command import command_line, finish, run_main
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row, summarise
from vkmoe.cpu.device import CpuDevice, n_cores
from vkmoe.devices import open_device
from vkmoe.gpu.backend import Backend, Link, Recording
from vkmoe.gpu.device import Device

TARGET_US = 50.0
WORK_US = ((0, 0), (0, 100), (100, 0), (100, 100), (300, 100), (100, 300), (300, 300))
MOST_BYTES = 64 << 20
N_TOKENS = 5  # of a repeat; their median counts
TRIAL_BYTES, N_TRIALS, COPIED_BYTES = 1 << 20, 200, 64


class _Sides(NamedTuple):
    """The work of all layers: in a chain, of the GPU alone, of the CPU alone."""

    chain: list[Link]
    of_gpu: list[Link]
    of_cpu: Callable[[], None]


def main() -> None:
    """Calibrate both sides, then measure each amount of work."""
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    parser.add_argument("--layers", type=int, default=48, help="default: 48")
    parser.add_argument("-t", "--threads", type=int, help="of the CPU (default: physical cores)")
    options = parser.parse_args()
    with ExitStack() as stack:
        device = stack.enter_context(open_device(options.device))
        cpu = stack.enter_context(CpuDevice(options.threads))
        card = describe(device.info)
        print_card(card)
        rows = []
        work = _Work(device, cpu, options.layers)
        for gpu_us, cpu_us in WORK_US:
            rows.append(_measure(work, gpu_us, cpu_us, options.repeats))
            print(rows[-1], flush=True)
        work.close()
    met = {row.what: row.value.median <= TARGET_US for row in rows}
    verdict = "met" if all(met.values()) else "MISSED"
    print(f"\ntarget: at most {TARGET_US:.0f} us a layer: {verdict}")
    results = {"rows": rows, "n_layers": options.layers, "n_threads": options.threads or n_cores()}
    finish("chain", card, results | {"targets_met": met}, options.record)


def _measure(work: _Work, gpu_us: int, cpu_us: int, repeats: int) -> Row:
    sides = work.sides(gpu_us, cpu_us)
    work.seconds(sides)  # what is done once only
    found = 1e6 * np.array([work.seconds(sides) for _ in range(repeats)]).T / work.n_layers
    together, gpu, cpu = found
    note = f"{summarise(together)} a layer; alone {summarise(gpu)} and {summarise(cpu)}"
    name = f"taking turns, {gpu_us} us of the GPU and {cpu_us} of the CPU"
    return Row(name, summarise(together - np.maximum(gpu, cpu)), "us", "host_wall", note)


class _Work:
    """Makes work of either side that takes about as long as asked, and runs it."""

    def __init__(self, device: Device, cpu: CpuDevice, n_layers: int) -> None:
        self.n_layers = n_layers
        self._device, self._cpu, self._backend = device, cpu, Backend(device)
        self._memory = device.allocate("device", MOST_BYTES, "work")
        self._bytes = np.zeros((2, COPIED_BYTES), np.uint8)
        trial = [Link(self._fill(TRIAL_BYTES)) for _ in range(N_TRIALS)]
        self._gpu_speed = N_TRIALS * TRIAL_BYTES / _median_s(lambda: self._run(trial))

    def sides(self, gpu_us: int, cpu_us: int) -> _Sides:
        """Record the parts of every layer."""
        n_filled = min(MOST_BYTES, int(gpu_us * 1e-6 * self._gpu_speed) // 4 * 4)
        copy, pool, chain = self._copy(), self._cpu.native.pool, list[Link]()

        def work() -> None:
            end = time.perf_counter_ns() + 1000 * cpu_us
            copy.run(pool)
            while time.perf_counter_ns() < end:
                pass

        for _ in range(self.n_layers):
            chain += [Link(self._fill(0), work, waits=bool(chain)), Link(self._fill(n_filled))]
        chain.append(Link(self._fill(0), waits=True))
        alone = [Link(self._fill(n)) for n in [0, n_filled] * self.n_layers]

        def of_cpu() -> None:
            for _ in range(self.n_layers):
                work()

        return _Sides(chain, alone, of_cpu)

    def seconds(self, sides: _Sides) -> tuple[float, float, float]:
        """Time a token: in a chain, of the GPU alone, of the CPU alone."""
        return (
            _median_s(lambda: self._run(sides.chain)),
            _median_s(lambda: self._run(sides.of_gpu)),
            _median_s(sides.of_cpu),
        )

    def close(self) -> None:
        self._memory.close()

    def _run(self, links: Sequence[Link]) -> None:
        self._backend.run_chain(links)

    def _fill(self, n_bytes: int) -> Recording:
        recorder = self._device.native.recorder()
        if n_bytes:
            recorder.fill(self._memory, 0, n_bytes, 0)
        return recorder.finish()

    def _copy(self) -> Any:
        recorder = self._cpu.native.recorder()
        source, target = (self._cpu.borrow(row) for row in self._bytes)
        recorder.copy(source, 0, target, 0, COPIED_BYTES)
        return recorder.finish()


def _median_s(run: Callable[[], None]) -> float:
    times = []
    for _ in range(N_TOKENS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


if __name__ == "__main__":
    run_main(main)
