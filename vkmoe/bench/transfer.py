"""This module runs the parts of `vkmoe bench transfer`: what submits, copies and reads cost.

It owns the list of parts, how much each measures by default, and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vkmoe.bench.clock import Clock, Memory, Roofline
from vkmoe.bench.copies import measure_copies, measure_link_speeds
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Output, Row, document
from vkmoe.bench.reads import distinct_types, measure_mapped, measure_reads
from vkmoe.bench.submits import measure_dispatches, measure_homes, measure_submits
from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device

__all__ = ["PARTS", "Settings", "run"]

EXPLANATION = (
    "A line is a median [95 % interval of it], its unit, the clock that ran, how often it did, the",
    "share of the roofline that the part names, and what was done. All was checked before.",
)


@dataclass(frozen=True)
class Settings:
    """Says how much the parts measure; sizes default by the kind of device."""

    repeats: int = 2 * MIN_REPEATS
    submits: int = 1000
    dispatches: int = 1000
    copy_mib: Sequence[float] = (0.25, 1, 3, 8, 64)
    homes_gib: Sequence[float] = ()
    read_mib: Sequence[float] = ()

    def filled(self, info: DeviceInfo) -> Settings:
        """Choose the sizes that are open: of homes, and of eight experts' gates or more."""
        homes = (0.25, 1.0) if info.is_cpu else (1.0, 4.0)
        reads = (8.0,) if info.is_cpu else (9.0, 256.0)
        return replace(self, homes_gib=self.homes_gib or homes, read_mib=self.read_mib or reads)

    def shortened(self) -> Settings:
        """Measure less, for a first impression."""
        return replace(
            self,
            repeats=min(self.repeats, MIN_REPEATS),
            submits=min(self.submits, 200),
            dispatches=min(self.dispatches, 200),
            copy_mib=[size for size in self.copy_mib if size <= 8] or self.copy_mib[:1],
            homes_gib=self.homes_gib or (0.25,),
            read_mib=self.read_mib or (2.0,),
        )


class _Part(NamedTuple):
    """Pairs the measuring with the roofline that its figures stand by."""

    measure: Callable[[Device, Settings], dict[str, Any]]
    roof: Callable[[Roofline], Row | None]


PARTS = {
    "submit": _Part(measure_submits, lambda roofline: None),
    "dispatch": _Part(measure_dispatches, lambda roofline: None),
    "copies": _Part(measure_copies, lambda roofline: roofline.host_copies),
    "homes": _Part(measure_homes, lambda roofline: None),
    "link": _Part(measure_link_speeds, lambda roofline: roofline.host_copies),
    "reads": _Part(measure_reads, lambda roofline: roofline.copy),
    "mapped": _Part(measure_mapped, lambda roofline: None),
}


def run(
    device_name: str | None, parts: Sequence[str], settings: Settings, output: Output
) -> dict[str, Any]:
    """Measure the roofline, then the parts (empty: all), each with its own section.

    Raises UsageError for a part that is not there, WrongResultError, GpuErrors.
    """
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise UsageError(f"no part {', '.join(unknown)}", f"there is {', '.join(PARTS)}")
    with Device(device_name) as device:
        card = describe(device.info)
        print_card(card, output.say)
        _say_memory(device.info, output)
        settings = settings.filled(device.info)
        with Clock(device, settings.repeats, Memory.of(device.info)) as clock:
            output.progress("measuring the roofline")
            roofline = clock.roofline()
        roofline.show(output)
        for line in EXPLANATION:
            output.say(line)
        results: dict[str, Any] = {"roofline": roofline.document()}
        for name in parts or PARTS:
            roof = PARTS[name].roof(roofline)
            output.say(f"\n== {name}" + (f", shares of: {roof.what}" if roof else ""))
            output.progress(f"measuring {name}")
            found = PARTS[name].measure(device, settings)
            _say_part(found, roof, output)
            results[name] = found | ({"roof": roof.what} if roof else {})
    return document("transfer", card, results)


def _say_memory(info: DeviceInfo, output: Output) -> None:
    """Write the static part of the card: which memory there is."""
    for index, heap in enumerate(info.heaps):
        kind = "device-local" if heap.device_local else "host"
        output.say(f"heap {index}: {heap.size / 2**20:.0f} MiB, {kind}")
    for kind_of_type in distinct_types(info):
        output.say(kind_of_type.label)
    output.say("")


def _say_part(found: dict[str, Any], roof: Row | None, output: Output) -> None:
    for key, value in found.items():
        if key == "rows":
            for row in value:
                output.say(row.line(f"{row.value.median / roof.value.median:.0%}" if roof else ""))
        elif isinstance(value, dict):
            for name, numbers in value.items():
                output.say(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items()))
        elif value or value is False:
            output.say(f"{key}: {value}")
