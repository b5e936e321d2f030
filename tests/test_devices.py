"""Which device is taken, by name and by default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.invented import APU, DISCRETE_12
from vkmoe import devices
from vkmoe.cpu.device import CpuDevice, cpu_info
from vkmoe.cpu.variants import choose
from vkmoe.devices import choose_device, list_devices, open_device, without_cpu
from vkmoe.errors import NoDeviceError, NoDriverError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu import device as gpu

SOFTWARE = replace(DISCRETE_12, index=1, name="llvmpipe (LLVM 15)", type="cpu")
OLD = replace(DISCRETE_12, index=2, name="Old card", api_version=(1, 1, 0))
OTHER = replace(APU, index=0)
NATIVE = replace(SOFTWARE, index=3, name="CPU (Some Model)", layout="file")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VKMOE_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("there", "wanted", "expected"),
    [
        ([OTHER, SOFTWARE, NATIVE], None, OTHER),
        ([SOFTWARE, NATIVE], None, NATIVE),
        ([NATIVE], None, NATIVE),
        ([SOFTWARE], None, SOFTWARE),
        ([OTHER, SOFTWARE, NATIVE], "cpu", NATIVE),
        ([OTHER, SOFTWARE, NATIVE], " CPU ", NATIVE),
        ([OTHER, SOFTWARE, NATIVE], "some model", NATIVE),
        ([OTHER, SOFTWARE, NATIVE], "3", NATIVE),
        ([SOFTWARE, NATIVE], "vulkan", SOFTWARE),
        ([SOFTWARE, NATIVE], "1", SOFTWARE),
        ([SOFTWARE, NATIVE], "llvmpipe", SOFTWARE),
    ],
)
def test_the_device_that_is_meant(
    there: list[DeviceInfo], wanted: str | None, expected: DeviceInfo
) -> None:
    """Without a name: a GPU, then the CPU, then a Vulkan driver on the CPU."""
    assert choose_device(there, wanted) is expected


def test_the_variable_names_a_device_in_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKMOE_DEVICE", "llvmpipe")
    assert choose_device([OTHER, SOFTWARE, NATIVE], None) is SOFTWARE
    assert choose_device([OTHER, SOFTWARE, NATIVE], "cpu") is NATIVE


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(NoDeviceError, match="no device matches 'Radeon'") as caught:
        choose_device([SOFTWARE, NATIVE], "Radeon")
    assert "1: llvmpipe (LLVM 15); 3: CPU (Some Model)" in caught.value.hint


def test_a_card_that_cannot_run_shaders_leaves_the_cpu() -> None:
    assert choose_device([OLD, NATIVE], None) is NATIVE


def test_without_kernels_for_it_the_cpu_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do stands where a list of other devices would not help."""
    monkeypatch.setattr(devices, "variant", lambda: choose({}, ()))
    monkeypatch.setattr(devices, "has_cpu", lambda: False)
    assert "without kernels for the CPU (build vkmoe without -DVKMOE_CPU=OFF)" in without_cpu()
    assert all(item.is_vulkan for item in list_devices())
    for ask in (lambda: choose_device([OTHER, SOFTWARE], "cpu"), lambda: open_device("CPU")):
        with pytest.raises(NoDeviceError, match="built without kernels for the CPU"):
            ask()


@pytest.mark.usefixtures("cpu_native")
def test_without_any_driver_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> list[DeviceInfo]:
        raise NoDriverError("no Vulkan driver found", "install one")

    monkeypatch.setattr(gpu, "list_devices", none)
    monkeypatch.setattr(devices, "has_cpu", lambda: True)
    (only,) = list_devices()
    assert not only.is_vulkan and only.index == 0 and only.name == cpu_info().name
    with open_device(None, n_threads=3) as opened:
        assert isinstance(opened, CpuDevice) and opened.native.pool.n_threads == 3
    monkeypatch.setattr(devices, "has_cpu", lambda: False)
    with pytest.raises(NoDriverError):
        list_devices()


@pytest.mark.usefixtures("cpu_native")
def test_the_validation_layer_watches_vulkan_devices_alone() -> None:
    with open_device(validation=True) as opened:
        assert opened.info.is_vulkan
    with pytest.raises(NoDeviceError, match="and the CPU is none") as caught:
        open_device("cpu", validation=True)
    assert "--device vulkan" in caught.value.hint
