"""Part `link`: what vkmoe itself measures of the link, to choose how misses are served (B 5).

Plain 16-byte loads of host memory in place beside copies of the same bytes, by the upload queue and
by the gather kernel, all at their best. The ratios decide whether misses are gathered, and whether
the user is told that they are expensive.
"""

from __future__ import annotations

from typing import Any

from bench.measure import MIN_REPEATS, Row, summarise
from bench.parts.common import Settings
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import measure_link
from vkmoe.placement.link import measure_gather

__all__ = ["measure"]


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of GB/s; each repeat measures all."""
    n_repeats = max(settings.repeats, MIN_REPEATS)
    speeds, gathers = [], []
    for _ in range(n_repeats):
        speeds.append(measure_link(device))
        gathers.append(measure_gather(device) / 1e9)
    reads = summarise([speed.read_bytes_per_second / 1e9 for speed in speeds])
    copies = summarise([speed.copy_bytes_per_second / 1e9 for speed in speeds])
    note = "wall where the queue has no timestamps"
    rows = [
        Row("reads of host memory in place", reads, "GB/s", "gpu_timestamp", note),
        Row("copies host -> device, upload queue", copies, "GB/s", "gpu_timestamp", note),
        Row(
            "copies host -> device, gather kernel",
            summarise(gathers),
            "GB/s",
            "gpu_timestamp",
            note,
        ),
    ]
    return {"rows": rows}
