"""The choice of a device, and what a user is told when there is none that works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest

from tests.gpu.invented import APU, DISCRETE_12, LAVAPIPE, SMALL_WINDOW
from tests.live import live_objects
from vkmoe.errors import (
    DeviceLostError,
    GpuError,
    NoDeviceError,
    NoDriverError,
    OutOfMemoryError,
)
from vkmoe.gpu import _native as native
from vkmoe.gpu import device as module
from vkmoe.gpu.device import Device, choose_device, list_devices, translate_errors

MACHINE = [replace(info, index=i) for i, info in enumerate([LAVAPIPE, APU, DISCRETE_12,
                                                            SMALL_WINDOW])]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (None, "12 GB discrete"),
        ("0", "lavapipe"),
        (" 1 ", "APU"),
        ("3", "8 GB with a 256 MiB window"),
        ("LAVA", "lavapipe"),
        ("gb", "12 GB discrete"),
        ("256 mib", "8 GB with a 256 MiB window"),
    ],
)
def test_choice(wanted: str | None, name: str) -> None:
    assert choose_device(MACHINE, wanted).name == name


def test_best_first() -> None:
    """Discrete before integrated before virtual before the CPU; then the driver's order."""
    left = [*MACHINE, replace(LAVAPIPE, name="passed through", type="virtual", index=9)]
    order = []
    while left:
        order.append(choose_device(left, None))
        left.remove(order[-1])
    assert [info.name for info in order] == [
        DISCRETE_12.name, SMALL_WINDOW.name, "APU", "passed through", "lavapipe"
    ]  # fmt: skip


@pytest.mark.parametrize("wanted", ["4", "GeForce", "-1"])
def test_no_such_device(wanted: str) -> None:
    with pytest.raises(NoDeviceError, match=re.escape(repr(wanted))) as caught:
        choose_device(MACHINE, wanted)
    assert "0: lavapipe; 1: APU; 2: 12 GB discrete" in caught.value.hint


def test_an_old_device_is_passed_over() -> None:
    old = replace(DISCRETE_12, features=frozenset())
    assert choose_device([old, APU], None) is APU


@pytest.mark.parametrize("wanted", [None, "0"])
def test_what_a_device_lacks_is_named(wanted: str | None) -> None:
    old = replace(DISCRETE_12, api_version=(1, 1, 0), features=frozenset(), index=0)
    with pytest.raises(NoDeviceError, match=r"lacks buffer_device_address, Vulkan 1\.2") as caught:
        choose_device([old], wanted)
    assert "12 GB discrete" in str(caught.value) and "--device" in caught.value.hint


def test_this_machine_has_the_chosen_device(device: Device) -> None:
    """Also: the facts of the real drivers fit the facts that tests invent.

    Mesa's drivers for the CPU and for integrated GPUs size their heaps after the memory that is
    free at the moment, so two calls may differ there.
    """
    listed = list_devices()
    assert replace(device.info, heaps=()) in [replace(info, heaps=()) for info in listed]
    assert all(info.memory_types and info.heaps for info in listed)
    assert all(t.heap < len(info.heaps) for info in listed for t in info.memory_types)


NO_DRIVER = """
from vkmoe.errors import NoDriverError
from vkmoe.gpu.device import list_devices
try:
    list_devices()
except NoDriverError as error:
    print(error, "|", error.hint)
"""


def test_no_driver() -> None:
    environment = os.environ | {
        "VK_DRIVER_FILES": os.devnull, "VK_ICD_FILENAMES": os.devnull
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    message, _, hint = done.stdout.partition(" | ")
    assert "Vulkan d" in message and hint.strip()


NO_LOADER = """
import sys
from importlib.abc import MetaPathFinder

class Unlinked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "vkmoe.gpu._native":
            raise ImportError(TEXT + ": cannot open shared object file: No such file or directory")

sys.meta_path.insert(0, Unlinked())
from vkmoe.cli import main
sys.exit(main(ARGUMENTS))
"""


def run_unlinked(library: str, *arguments: str) -> str:
    """What the command line says when the extension cannot be loaded for want of a library."""
    script = NO_LOADER.replace("TEXT", repr(library)).replace("ARGUMENTS", repr(list(arguments)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("arguments", [["devices"], ["version"], ["generate", "-p", "hello"]])
def test_no_vulkan_loader(arguments: list[str]) -> None:
    """Without it the extension, which links it, cannot even be imported."""
    said = run_unlinked("libvulkan.so.1", *arguments)
    assert "error: the Vulkan loader (libvulkan.so.1) is not installed" in said
    assert "hint: install libvulkan1 (Debian, Ubuntu) or vulkan-loader (Fedora, Arch)" in said


def test_another_missing_library_is_no_missing_loader() -> None:
    assert "internal error, ImportError: libm.so.6" in run_unlinked("libm.so.6", "devices")


class FakeNode(PosixPath):
    """A path whose folder lists render nodes."""

    def glob(self, pattern: str) -> list[Path]:  # type: ignore[override]
        assert str(self) == "/dev/dri"
        return [Path("/dev/dri/renderD129"), Path("/dev/dri/renderD128")]


def test_no_permission_on_the_render_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most common reason on Linux: the user is not in the render group."""
    monkeypatch.setattr(module, "Path", FakeNode)
    monkeypatch.setattr("os.access", lambda node, mode: str(node).endswith("9"))
    monkeypatch.setattr(native, "Instance", _failing_instance("VK_ERROR_INCOMPATIBLE_DRIVER"))
    with pytest.raises(
        NoDriverError, match=r"no permission to open /dev/dri/renderD128$"
    ) as caught:
        list_devices()
    assert "render" in caught.value.hint and "usermod" in caught.value.hint
    monkeypatch.setattr("os.access", lambda node, mode: True)
    with pytest.raises(NoDriverError, match="VK_ERROR_INCOMPATIBLE_DRIVER") as caught:
        list_devices()
    assert "mesa-vulkan-drivers" in caught.value.hint


def test_no_validation_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "Instance", _failing_instance("VK_ERROR_LAYER_NOT_PRESENT"))
    with pytest.raises(NoDriverError, match="validation layer is not installed") as caught:
        Device(validation=True)
    assert "vulkan-validationlayers" in caught.value.hint


def test_a_layer_that_does_not_look_is_refused() -> None:
    """The environment can switch the check off; a silent run would then be no proof of anything."""
    code = "from vkmoe.gpu.device import Device; Device(validation=True)"
    ignored = "SYNC-HAZARD-READ-AFTER-WRITE"
    for variables in ({}, {"VK_LAYER_MESSAGE_ID_FILTER": ignored}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True
        )
        refused = "its silence would prove nothing" in done.stderr
        assert (done.returncode != 0, refused) == (bool(variables), bool(variables)), done.stderr


def test_what_the_check_itself_provokes_is_not_reported() -> None:
    before = live_objects()
    with Device(validation=True) as opened:
        assert opened.validation_messages() == []
    assert native.live_objects() == before


def _vulkan_error(kind: type[native.VulkanError], result: str) -> native.VulkanError:
    error = kind(f"vkCall: {result}")
    error.result, error.call = result, "vkCall"
    return error


def _failing_instance(result: str) -> object:
    def make(validation: bool = False) -> None:
        raise _vulkan_error(native.VulkanError, result)

    return make


@pytest.mark.parametrize(
    ("kind", "result", "raised", "text"),
    [
        (native.DeviceLost, "VK_ERROR_DEVICE_LOST", DeviceLostError, "reset the device"),
        (
            native.VulkanError,
            "VK_ERROR_OUT_OF_DEVICE_MEMORY",
            OutOfMemoryError,
            "out of GPU memory",
        ),
        (native.VulkanError, "VK_ERROR_OUT_OF_HOST_MEMORY", OutOfMemoryError, "out of host memory"),
        (native.VulkanError, "VK_ERROR_FEATURE_NOT_PRESENT", GpuError, "FEATURE_NOT_PRESENT"),
        (native.VulkanError, "VK_TIMEOUT", DeviceLostError, "did not finish its work in time"),
    ],
)
def test_errors_are_translated(
    kind: type[native.VulkanError], result: str, raised: type[GpuError], text: str
) -> None:
    with pytest.raises(raised, match=text) as caught, translate_errors("testing"):
        raise _vulkan_error(kind, result)
    assert type(caught.value) is raised and caught.value.result == result
    assert "while testing" in str(caught.value) and caught.value.hint


def test_a_closed_device_leaves_nothing() -> None:
    before = live_objects()
    opened = Device()
    opened.close()
    opened.close()
    assert native.live_objects() == before
