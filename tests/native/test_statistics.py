"""What a driver says of a pipeline is kept on request only; lavapipe has nothing, and is refused.

The drivers that do have statistics are in tests/gpu_drivers.
"""

from __future__ import annotations

import pytest

from vkmoe.errors import NoDeviceError
from vkmoe.gpu.device import STATISTICS, Device, spirv_words


def test_a_device_opened_without_statistics_has_none():
    with Device() as device:
        words = device.native.tensor(16)
        kernel = device.native.kernel(spirv_words("finish"), [words, words], [1], 0, "finish")
        with pytest.raises(RuntimeError, match=r"finish.*without pipeline_statistics"):
            kernel.executables()
        with pytest.raises(RuntimeError, match=r"finish.*without pipeline_statistics"):
            device.native.kernel(spirv_words("finish"), [words, words], [1], 0, "finish", 0, True)


def test_a_driver_that_keeps_none_is_refused():
    with Device() as device:
        if STATISTICS in device.info.features:
            pytest.skip(f"{device.info.name} keeps statistics")
    with pytest.raises(NoDeviceError, match="keeps no statistics of pipelines"):
        Device(statistics=True)
