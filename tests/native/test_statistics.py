"""What a driver says of a pipeline is kept on request only; one that says nothing is refused.

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
        keeps = STATISTICS in device.info.features
    if keeps:  # lavapipe does not
        with Device(statistics=True) as device:
            words = device.native.tensor(16)
            kernel = device.native.kernel(spirv_words("finish"), [words, words], [1], 0, "finish")
            assert kernel.executables()[0].statistics
    else:
        with pytest.raises(NoDeviceError, match="keeps no statistics of pipelines"):
            Device(statistics=True)
