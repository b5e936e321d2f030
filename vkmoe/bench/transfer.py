"""This module runs the parts of `vkmoe bench transfer`: what submits, copies and reads cost.

It owns the list of parts, how much each measures by default, and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vkmoe.bench.clock import Clock, LinkRows, Memory, Roofline
from vkmoe.bench.copies import measure_copies, measure_link_speeds
from vkmoe.bench.defaults import COPY_MIB, DISPATCHES, READ_MIB, REPEATS, SUBMITS
from vkmoe.bench.environment import show_card
from vkmoe.bench.measure import Output, Row, document
from vkmoe.bench.reads import distinct_types, measure_reads
from vkmoe.bench.submits import measure_dispatches, measure_submits
from vkmoe.devices import open_device
from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device

EXPLANATION = (
    "A line is a median [95 % interval of it], its unit, the clock that ran, how often it did, the",
    "share of the roofline that the part names, and what was done. All was checked before.",
)


@dataclass(frozen=True)
class TransferChoice:
    """Says which parts are measured (empty: all), and how much; None: what is usual."""

    parts: Sequence[str] = ()
    repeats: int | None = None
    submits: int | None = None
    dispatches: int | None = None
    copy_mib: tuple[float, ...] | None = None
    read_mib: tuple[float, ...] | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown:
            raise UsageError(f"no part {', '.join(unknown)}", f"there is {', '.join(PARTS)}")

    def settings(self, info: DeviceInfo) -> Settings:
        """Choose what is open, by the kind of device."""
        quick, is_cpu = self.quick, info.is_cpu
        return Settings(
            REPEATS.chosen(self.repeats, quick),
            SUBMITS.chosen(self.submits, quick),
            DISPATCHES.chosen(self.dispatches, quick),
            COPY_MIB.chosen(self.copy_mib, quick),
            READ_MIB.chosen(self.read_mib, quick, is_cpu),
        )


class Settings(NamedTuple):
    """Says how much the parts measure."""

    repeats: int
    submits: int
    dispatches: int
    copy_mib: tuple[float, ...]
    read_mib: tuple[float, ...]


class _Part(NamedTuple):
    """Pairs the measuring with the roofline that its figures stand by."""

    measure: Callable[[Device, Settings], dict[str, Any]]
    roof: Callable[[Roofline], Row | None]


def _link(roofline: Roofline) -> LinkRows:
    assert roofline.link is not None, "a CPU was refused"
    return roofline.link


PARTS = {
    "submit": _Part(measure_submits, lambda roofline: None),
    "dispatch": _Part(measure_dispatches, lambda roofline: None),
    "copies": _Part(measure_copies, lambda roofline: _link(roofline).copies),
    "link": _Part(measure_link_speeds, lambda roofline: _link(roofline).copies),
    "reads": _Part(measure_reads, lambda roofline: roofline.memory),
}


def run(device_name: str | None, choice: TransferChoice, output: Output) -> dict[str, Any]:
    """Measure the roofline, then the parts, each with its own section.

    Raises UsageError for a CPU, WrongResultError, GpuErrors.
    """
    with open_device(device_name) as device:
        if not device.info.is_vulkan:
            raise UsageError(
                f"nothing is transferred to {device.info.name}: it reads memory where it is",
                "`vkmoe bench kernels` has its memory and kernels; --device takes a Vulkan device",
            )
        card = show_card(device, None, output)
        _say_memory(device.info, output)
        settings = choice.settings(device.info)
        with Clock(device, settings.repeats, Memory.of(device.info)) as clock:
            output.progress("measuring the roofline")
            roofline = clock.roofline()
        roofline.show(output)
        output.known({"device": card["device"], "clock": roofline.latency_mode})
        for line in EXPLANATION:
            output.say(line)
        results: dict[str, Any] = {"roofline": roofline.document()}
        for name in choice.parts or PARTS:
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
                known = {k: "not known" if v is None else f"{v:.4g}" for k, v in numbers.items()}
                output.say(f"{name}: " + ", ".join(f"{k} {v}" for k, v in known.items()))
        elif value or value is False:
            output.say(f"{key}: {value}")
