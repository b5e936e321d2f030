"""What submits, dispatches, copies and GPU reads cost on a device.

python -m bench.transfer                 all parts
python -m bench.transfer submit reads    some of them

Parts: submit (empty submits, ways to wait), dispatch (with and without barriers), copies (both
directions, each queue, by size), homes (submit cost by bytes of host memory referenced), link
(plain reads of host memory in place beside copies of it), reads (the matvec with weights in each
memory type, and copies from there), mapped (CPU reads and writes of each mapped type), address
(loads by address beside loads through a descriptor).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from bench.environment import describe, print_card
from bench.measure import MIN_REPEATS, Row, command_line, finish, run_main
from bench.parts import address, copies, dispatch, homes, link, memory, reads, submit
from bench.parts.common import Settings
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device

PARTS: dict[str, Callable[[Device, Settings], dict[str, Any]]] = {
    "submit": submit.measure,
    "dispatch": dispatch.measure,
    "copies": copies.measure,
    "homes": homes.measure,
    "link": link.measure,
    "reads": reads.measure,
    "mapped": memory.measure,
    "address": address.measure,
}
READ_MIB_CPU, READ_MIB_GPU = (8.0,), (9.0, 256.0)  # eight experts' gates; more than any cache


def main() -> None:
    """Run the parts asked for, each with its own section."""
    options = _options()
    results: dict[str, Any] = {}
    with Device(options.device) as device:
        card = describe(device.info)
        print_card(card)
        _print_memory(device.info)
        settings = _settings(options, device.info, card)
        for name in options.parts or PARTS:
            print(f"\n== {name}", flush=True)
            results[name] = PARTS[name](device, settings)
            _print_part(results[name])
    print()
    finish("transfer", card, results, options.record)


def _options() -> argparse.Namespace:
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--submits", type=int, default=1000, help="default: 1000")
    parser.add_argument("--dispatches", type=int, default=1000, help="default: 1000")
    parser.add_argument("--copy-mib", type=_sizes, default="0.25,1,3,8,64")
    parser.add_argument("--homes-gib", type=_sizes, default="0.25,1", help="on a real GPU: 1,4,16")
    parser.add_argument("--read-mib", type=_sizes, help="default: by device type")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there is {', '.join(PARTS)}")
    return options


def _sizes(text: str) -> tuple[float, ...]:
    sizes = tuple(float(word) for word in text.split(","))
    if not all(size > 0 for size in sizes):
        raise ValueError("sizes must be positive")
    return sizes


def _settings(options: argparse.Namespace, info: DeviceInfo, card: dict[str, Any]) -> Settings:
    return Settings(
        card,
        options.repeats,
        options.submits,
        options.dispatches,
        options.copy_mib,
        options.homes_gib,
        options.read_mib or (READ_MIB_CPU if info.is_cpu else READ_MIB_GPU),
    )


def _print_memory(info: DeviceInfo) -> None:
    """The static part of the card: what memory there is."""
    for index, heap in enumerate(info.heaps):
        kind = "device-local" if heap.device_local else "host"
        print(f"heap {index}: {heap.size / 2**20:.0f} MiB, {kind}")
    for kind_of_type in memory.distinct_types(info):
        print(kind_of_type.label)


def _print_part(results: dict[str, Any]) -> None:
    for key, value in results.items():
        if key == "rows":
            for row in value:
                assert isinstance(row, Row)
                print(row)
        elif isinstance(value, dict):
            for name, numbers in value.items():
                print(f"{key}: {name}: {numbers}")
        elif value or value is False:
            print(f"{key}: {value}")


if __name__ == "__main__":
    run_main(main)
