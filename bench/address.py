"""The same loads by buffer address and through a descriptor.

python -m bench.address

Up to 6 % in favour of either is expected; above 10 % the driver deserves a note. The two kernels
are one small shader of the benchmark's own, compiled here: they are no part of the package.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.arms import take_turns
from bench.command import command_line, finish, run_main
from tools.compile_shaders import ShaderError, Variant, compile_variant
from vkmoe.bench.clock import MIB, WrongResultError, time_recording
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.errors import VkmoeError
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.ops.tuning import choose_tuning

if TYPE_CHECKING:
    from vkmoe.gpu import _native

SHADERS = Path(__file__).resolve().parent / "shaders"
UNITS_PER_LANE, UNIT_BYTES = 16, 16
MIB_CPU, MIB_GPU = 8, 96  # a descriptor must reach it on every device: at most 128 MiB
WAYS: dict[str, dict[str, str]] = {"address": {"BY_ADDRESS": "1"}, "descriptor": {}}
# As the kernels for CPU drivers load: 64-bit components, where the device has shaderInt64.
WAY_64BIT = {"address in 64 bits": {"BY_ADDRESS": "1", "LOAD_64BIT": "1"}}


def main() -> None:
    """Check each way of loading, then take turns."""
    options = command_line(__doc__, repeats=2 * MIN_REPEATS).parse_args()
    with Device(options.device) as device:
        card = describe(device.info)
        print_card(card)
        results = _measure(device, options.repeats, card)
    for row in results["rows"]:
        print(row)
    print(f"address / descriptor = {results['address_over_descriptor']}")
    finish("address", card, results, options.record)


def _measure(device: Device, repeats: int, card: dict[str, Any]) -> dict[str, Any]:
    """Rows of GB/s by way of loading, and address over descriptor."""
    kernels = _compile(WAYS | (WAY_64BIT if "int64" in device.info.features else {}))
    size = choose_tuning(device.info).workgroup_size
    n_bytes = (MIB_CPU if device.info.is_cpu else MIB_GPU) * MIB
    n_lanes = n_bytes // (UNITS_PER_LANE * UNIT_BYTES)
    words = np.random.default_rng(0).integers(0, 1 << 32, n_bytes // 4, np.uint32)
    buffer = device.allocate("device", n_bytes, "by address")
    bound = device.native.tensor(n_bytes // 4, "bound")
    sums = device.native.tensor(n_lanes, "sums")
    with Transfer(device) as transfer:
        for target in (buffer, bound):
            transfer.write(target, 0, words.view(np.uint8))
        transfer.flush()
    push = struct.pack("<Q", buffer.address)
    arms: dict[str, Callable[[], float]] = {}
    for way, spirv in kernels.items():
        kernel = device.native.kernel(spirv, [bound, sums], [size], len(push), way)
        recording = _record(device, kernel, n_lanes // size, push)
        _check(device, recording, sums, _expected(words, size), way)
        arms[way] = _speed(device, recording, n_bytes)
    taken = take_turns(arms, max(repeats, MIN_REPEATS), "GB/s")
    rows = [
        Row(f"{n_bytes / MIB:g} MiB by {way}", taken.summary(way), "GB/s", "gpu_timestamp")
        for way in arms
    ]
    ratio = taken.ratio("address", "descriptor", card)
    buffer.close()
    return {"rows": rows, "address_over_descriptor": ratio}


def _compile(ways: dict[str, dict[str, str]]) -> dict[str, bytes]:
    """SPIR-V by way of loading."""
    kernels = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, defines in ways.items():
            out = Path(folder) / f"{way}.spv"
            variant = Variant(f"read_words+{way}", "read_words.comp", defines)
            try:
                compile_variant(variant, SHADERS, out)
            except ShaderError as error:
                raise VkmoeError(f"no shader: {error}", "install glslang") from error
            kernels[way] = out.read_bytes()
    return kernels


def _record(
    device: Device, kernel: _native.Kernel, n_groups: int, push: bytes
) -> _native.Recording:
    recorder = device.native.recorder(n_timestamps=2)
    recorder.timestamp(0)
    recorder.dispatch(kernel, (n_groups, 1, 1), push)
    recorder.timestamp(1)
    return recorder.finish()


def _expected(words: NDArray[np.uint32], size: int) -> NDArray[np.uint32]:
    """What each lane must find: [n_groups, step, lane, word of a unit] -> [n_groups * lane]."""
    units = words.reshape(-1, UNITS_PER_LANE, size, UNIT_BYTES // 4)
    found: NDArray[np.uint32] = np.bitwise_xor.reduce(units, axis=(1, 3)).reshape(-1)
    return found


def _check(
    device: Device,
    recording: _native.Recording,
    sums: _native.Tensor,
    expected: NDArray[np.uint32],
    way: str,
) -> None:
    """Cleared, run, compared, before anything is timed."""
    clear = device.native.recorder()
    clear.fill(sums, 0, 4 * sums.n_words, 0)
    device.native.submit(clear.finish()).wait()
    device.native.submit(recording).wait()
    with Transfer(device) as transfer:
        found = transfer.read(sums, 0, 4 * sums.n_words).view(np.uint32)
    if not np.array_equal(found, expected):
        raise WrongResultError(f"loads by {way} read other words")


def _speed(device: Device, recording: _native.Recording, n_bytes: int) -> Callable[[], float]:
    return lambda: n_bytes / time_recording(device, recording, 1).device[0] / 1e9


if __name__ == "__main__":
    run_main(main)
