"""The choice of a device and of its memory, and what a user is told when none works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest

from tests.gpu.invented import (
    AMD,
    APU,
    DEVICES,
    DISCRETE_12,
    LAVAPIPE,
    NO_WINDOW,
    NOT_COHERENT,
    SMALL_WINDOW,
)
from tests.live import live_objects
from vkmoe.errors import (
    DeviceLostError,
    GpuError,
    NoDeviceError,
    NoDriverError,
    OutOfMemoryError,
)
from vkmoe.facts import DeviceInfo, MemoryType
from vkmoe.gpu import _native as native
from vkmoe.gpu import device as module
from vkmoe.gpu.device import (
    EXCLUDED,
    Device,
    Intent,
    choose_device,
    list_devices,
    memory_type_candidates,
    translate_errors,
)

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


NO_LIBM = """
import sys
from importlib.abc import MetaPathFinder

class Unlinked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "vkmoe.gpu._native":
            raise ImportError("libm.so.6: cannot open shared object file: No such file")

sys.meta_path.insert(0, Unlinked())
from vkmoe.cli import main
sys.exit(main(["devices"]))
"""


def test_another_missing_library_is_no_missing_loader() -> None:
    done = subprocess.run([sys.executable, "-c", NO_LIBM], capture_output=True, text=True)
    assert done.returncode == 1
    assert "internal error, ImportError: libm.so.6" in done.stderr


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


FACTS = Path(__file__).resolve().parent.parent.parent / "vkmoe" / "gpu" / "native" / "facts.cpp"
INTENTS: list[Intent] = ["device", "host", "readback", "bar"]
BEST = [
    (SMALL_WINDOW, {"device": 1, "host": 2, "readback": 3, "bar": 4}),
    (DISCRETE_12, {"device": 0, "host": 1, "readback": 2, "bar": 3}),
    (AMD, {"device": 5, "host": 6, "readback": 7, "bar": 8}),
    (NO_WINDOW, {"device": 0, "host": 1, "readback": 2, "bar": 0}),
    (APU, {"device": 4, "host": 4, "readback": 3, "bar": 2}),
    (LAVAPIPE, {"device": 0, "host": 0, "readback": 0, "bar": 0}),
    (NOT_COHERENT, {"device": 1, "host": 1, "readback": 0, "bar": 1}),
]


@pytest.mark.parametrize(("info", "best"), BEST, ids=lambda item: getattr(item, "name", ""))
def test_the_best_type(info: DeviceInfo, best: dict[Intent, int]) -> None:
    assert {intent: memory_type_candidates(info, intent)[0] for intent in INTENTS} == best


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
@pytest.mark.parametrize("intent", INTENTS)
def test_every_candidate_serves_its_intent(info: DeviceInfo, intent: Intent) -> None:
    """None is excluded, none twice; what the CPU touches is mapped, what it writes is coherent."""
    candidates = memory_type_candidates(info, intent)
    assert candidates and len(set(candidates)) == len(candidates)
    for index in candidates:
        flags = info.memory_types[index].flags
        assert not flags & EXCLUDED
        if intent in ("device", "bar"):
            assert info.is_uma or "DEVICE_LOCAL" in flags
        if intent in ("host", "readback"):
            assert "HOST_VISIBLE" in flags
        if intent != "readback":  # the one that is invalidated by hand
            assert "HOST_COHERENT" in flags or "HOST_VISIBLE" not in flags


def test_weights_keep_out_of_the_window() -> None:
    """The mapped window of a card is the last place for weights, never the first."""
    assert memory_type_candidates(SMALL_WINDOW, "device") == [1, 4]


def test_tables_are_in_the_window_and_else_in_unmapped_device_memory() -> None:
    """Never in host memory on a card, not even when all else is refused."""
    assert memory_type_candidates(SMALL_WINDOW, "bar") == [4, 1]
    assert memory_type_candidates(DISCRETE_12, "bar") == [3, 0]
    assert memory_type_candidates(AMD, "bar") == [8, 5]
    assert memory_type_candidates(NO_WINDOW, "bar") == [0]


def test_tables_need_no_flush() -> None:
    """A window that is not coherent is passed over: tables are written without a flush."""
    stale = MemoryType(0, frozenset({"DEVICE_LOCAL", "HOST_VISIBLE"}))
    info = replace(NO_WINDOW, memory_types=(stale, *NO_WINDOW.memory_types))
    assert memory_type_candidates(info, "bar") == [1]


def test_homes_are_in_host_memory_on_cards() -> None:
    for info in (SMALL_WINDOW, DISCRETE_12, AMD):
        first = memory_type_candidates(info, "host")[0]
        assert not info.heaps[info.memory_types[first].heap].device_local


def test_excluded_flags_are_names_the_extension_uses() -> None:
    """A flag spelled otherwise would exclude nothing."""
    names = set(re.findall(r'VK_MEMORY_PROPERTY_\w+, "(\w+)"', FACTS.read_text()))
    assert "HOST_VISIBLE" in names and names >= EXCLUDED
