"""Part `link`: what vkmoe itself measures of the link, for a note to the user (B 5, no decoding).

Plain 16-byte loads of host memory in place beside a copy of the same bytes, both at their best: the
ratio decides whether the user is told that misses are expensive.
"""

from __future__ import annotations

from typing import Any

from bench.measure import MIN_REPEATS, Row, summarise
from bench.parts.common import Settings
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import measure_link

__all__ = ["measure"]


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of GB/s; each repeat measures both."""
    speeds = [measure_link(device) for _ in range(max(settings.repeats, MIN_REPEATS))]
    reads = summarise([speed.read_bytes_per_second / 1e9 for speed in speeds])
    copies = summarise([speed.copy_bytes_per_second / 1e9 for speed in speeds])
    note = "wall where the queue has no timestamps"
    rows = [
        Row("reads of host memory in place", reads, "GB/s", "gpu_timestamp", note),
        Row("copies host -> device, upload queue", copies, "GB/s", "gpu_timestamp", note),
    ]
    return {"rows": rows}
