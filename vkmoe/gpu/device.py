"""Opens a Vulkan device: its choice, its features, memory by intent, and errors to act on.

Owns the native instance and device. Only this package imports the extension.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

from vkmoe.closing import Closing
from vkmoe.errors import DeviceLostError, GpuError, NoDeviceError, NoDriverError, OutOfMemoryError
from vkmoe.facts import (
    MATRIX_FEATURES,
    DeviceInfo,
    DeviceLimits,
    Heap,
    MatrixShape,
    MemoryType,
)
from vkmoe.gpu.program import Dispatch

if TYPE_CHECKING:
    from vkmoe.gpu import _native

REQUIRED_FEATURES = ("buffer_device_address",)
# Switched on when present: for the kernels of CPU drivers, for those that multiply in f16, for
# timestamps of queues that only copy, for kernels that must add alike.
OPTIONAL_FEATURES = (
    *("int64", "float16", "host_query_reset"),
    *("subgroup_size_control", "compute_full_subgroups"),
)
STATISTICS = "pipeline_statistics"  # asked for alone: compilers then keep what they found out
_EXTENSION = "vkmoe.gpu._native"
VULKAN = "vulkan"  # what --device takes for the best device that has a Vulkan driver
HAZARD = "SYNC-HAZARD"  # begins the name of every message of synchronisation validation
OUT_OF_MEMORY = ("VK_ERROR_OUT_OF_DEVICE_MEMORY", "VK_ERROR_OUT_OF_HOST_MEMORY")
_TYPE_ORDER = {"discrete": 0, "integrated": 1, "virtual": 2, "other": 3, "cpu": 4}
# What the extension and DeviceInfo say in the same form.
_SAME_FACTS = (
    *("index", "name", "type", "vendor_id", "driver_name", "driver_info"),
    *("subgroup_size", "subgroup_arithmetic", "subgroup_shuffle", "takes_subgroup_size"),
)
_DRIVER_HINT = (
    "install a Vulkan driver (Debian: mesa-vulkan-drivers, which also runs on the CPU), "
    "then look at `vkmoe devices`"
)

# `device`: weights, caches and slots; `host`: homes and staging; `readback`: what the CPU reads;
# `bar`: small tables the CPU writes and the GPU reads.
Intent = Literal["device", "host", "readback", "bar"]
# AMD's debugging types: coherent or uncached on the device, ten times slower.
EXCLUDED = frozenset(
    {"DEVICE_COHERENT_AMD", "DEVICE_UNCACHED_AMD", "PROTECTED", "LAZILY_ALLOCATED"}
)


def native() -> ModuleType:
    """Import `vkmoe.gpu._native`. Raises NoDriverError where the Vulkan loader is missing."""
    try:
        from vkmoe.gpu import _native
    except ImportError as error:
        if "libvulkan" not in str(error):
            raise
        raise NoDriverError(
            "the Vulkan loader (libvulkan.so.1) is not installed",
            "install libvulkan1 (Debian, Ubuntu) or vulkan-loader (Fedora, Arch)",
            str(error),
        ) from error
    return _native


def kompute_version() -> str:
    """Return the version of the Kompute classes inside the extension."""
    return str(native().kompute_version)


def spirv_folder() -> Path:
    """Find the folder of the compiled shaders: beside the extension, which need not be loaded."""
    extension = find_spec(_EXTENSION)
    assert extension is not None and extension.origin is not None, "rebuild the package"
    return Path(extension.origin).parent / "spirv"


@cache
def spirv_words(variant: str) -> bytes:
    """Read the SPIR-V of one variant; a missing one is a broken installation."""
    path = spirv_folder() / f"{variant}.spv"
    assert path.exists(), f"no compiled shader {variant}: rebuild the package"
    return path.read_bytes()


def vulkan_errors() -> tuple[type[_native.VulkanError], ...]:
    """List the classes of the extension's errors, for `except`. The CPU loads no extension."""
    extension = sys.modules.get(_EXTENSION)
    return () if extension is None else (extension.VulkanError,)


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn the extension's VulkanError into the VkmoeError a user can act on."""
    try:
        yield
    except vulkan_errors() as error:
        raise translated(error, doing) from error


def translated(error: _native.VulkanError, doing: str) -> GpuError:
    """Return the VkmoeError that tells what the extension's error means for the user."""
    if isinstance(error, native().DeviceLost):
        return DeviceLostError(
            f"the GPU driver reset the device while {doing} ({error.call})",
            "close other GPU programs, lower --ctx-size, and look in the kernel log",
            error.result,
        )
    if error.result == "VK_TIMEOUT":
        return DeviceLostError(
            f"the GPU did not finish its work in time while {doing} ({error.call})",
            "it may hang: look in the kernel log; its memory is free once vkmoe has ended",
            error.result,
        )
    if error.result in OUT_OF_MEMORY:
        where = "GPU" if "DEVICE" in error.result else "host"
        return OutOfMemoryError(
            f"out of {where} memory while {doing} ({error.call})",
            "close other GPU programs, lower --ctx-size, or take a smaller model",
            error.result,
        )
    return GpuError(
        f"{error.call} failed with {error.result} while {doing}",
        "see `vkmoe devices` and the driver's log",
        error.result,
    )


def list_devices(instance: _native.Instance | None = None) -> list[DeviceInfo]:
    """List all Vulkan devices in the loader's order. Raises NoDriverError if there is no driver."""
    extension = native()
    own = instance or _make_instance(validation=False)
    try:
        found = [_device_info(facts) for facts in own.physical_devices()]
    except extension.VulkanError as error:
        raise _no_driver(error.result) from error
    finally:
        if instance is None:
            own.close()
    if not found:
        raise _no_driver("no device reported")
    return found


def _device_info(facts: dict[str, Any]) -> DeviceInfo:
    """Read one entry of the extension's `physical_devices()`."""
    limits: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in facts["limits"].items()
    }
    return DeviceInfo(
        **{key: facts[key] for key in _SAME_FACTS},
        api_version=tuple(facts["api_version"]),
        features=frozenset(facts["features"]),
        heaps=tuple(Heap(**heap) for heap in facts["heaps"]),
        memory_types=tuple(
            MemoryType(item["heap"], frozenset(item["flags"])) for item in facts["memory_types"]
        ),
        limits=DeviceLimits(**limits),
        subgroup_range=(facts["min_subgroup_size"], facts["max_subgroup_size"]),
        matrix_shapes=tuple(MatrixShape(*shape) for shape in facts["matrix_shapes"]),
    )


def choose_device(devices: list[DeviceInfo], wanted: str | None) -> DeviceInfo:
    """Choose the device a user means: by index, by part of its name, or the best one.

    Best is discrete before integrated before CPU; "vulkan" means the same. Raises NoDeviceError
    with what there is.
    """
    if wanted is not None and wanted.strip().lower() == VULKAN:
        wanted = None
    listing = "; ".join(f"{d.index}: {d.name}" for d in devices)
    if wanted is not None:
        if wanted.strip().isdigit():
            matches = [d for d in devices if d.index == int(wanted)]
        else:
            matches = [d for d in devices if wanted.strip().lower() in d.name.lower()]
        if not matches:
            raise NoDeviceError(f"no device matches {wanted!r}", f"there is {listing}")
        chosen = matches[0]
    else:
        able = [d for d in devices if not missing_features(d)]
        chosen = min(able or devices, key=lambda d: (_TYPE_ORDER.get(d.type, 3), d.index))
    missing = missing_features(chosen)
    if missing:
        raise NoDeviceError(
            f"{chosen.name} cannot run vkmoe: it lacks {', '.join(missing)} (Vulkan 1.2)",
            f"update its driver, or choose another with --device; there is {listing}",
        )
    return chosen


def missing_features(device: DeviceInfo) -> list[str]:
    """Name what a device lacks to run shaders."""
    missing = [name for name in REQUIRED_FEATURES if name not in device.features]
    return missing + ["Vulkan 1.2"] * (device.api_version[:2] < (1, 2))


def _make_instance(validation: bool) -> _native.Instance:
    extension = native()
    try:
        return cast("_native.Instance", extension.Instance(validation=validation))
    except extension.VulkanError as error:
        if validation and error.result == "VK_ERROR_LAYER_NOT_PRESENT":
            raise NoDriverError(
                "the Vulkan validation layer is not installed",
                "install it (Debian: vulkan-validationlayers) or drop --validation",
                error.result,
            ) from error
        raise _no_driver(error.result) from error


def blocked_render_nodes() -> list[str]:
    """List render nodes of GPUs that this user may not open: their drivers list nothing."""
    nodes = sorted(Path("/dev/dri").glob("renderD*"))
    return [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]


def _no_driver(detail: str) -> NoDriverError:
    if blocked := blocked_render_nodes():
        return NoDriverError(
            f"no usable Vulkan device: no permission to open {', '.join(blocked)}",
            "add yourself to the `render` group (sudo usermod -aG render $USER) and log in again",
            detail,
        )
    return NoDriverError(f"no Vulkan driver found ({detail})", _DRIVER_HINT, detail)


class Device(Closing):
    """Owns an open device. Use it as a context manager; `close()` frees everything made from it.

    With `validation` it opens only where the validation layer reports a missing barrier. With
    `statistics` kernels can say what the driver's compiler made of them. Raises NoDriverError,
    NoDeviceError and other GpuErrors.
    """

    def __init__(
        self, wanted: str | None = None, validation: bool = False, statistics: bool = False
    ) -> None:
        self._early_messages: list[str] = []  # of the validation layer, while opening
        self._instance = _make_instance(validation)
        with ExitStack() as cleanup:  # kept unless something fails
            cleanup.callback(self._instance.close)
            self.info = choose_device(list_devices(self._instance), wanted)
            if statistics and STATISTICS not in self.info.features:
                raise NoDeviceError(
                    f"{self.info.name}'s driver keeps no statistics of pipelines "
                    "(VK_KHR_pipeline_executable_properties)",
                    "choose another device; without hardware: tools/with_gpu_driver",
                )
            features = [name for name in OPTIONAL_FEATURES if name in self.info.features]
            features += sorted(MATRIX_FEATURES) if self.info.half_shapes else []
            features += [*REQUIRED_FEATURES, *[STATISTICS] * statistics]
            with translate_errors(f"opening {self.info.name}"):
                self.native = self._instance.open(self.info.index, features)
            cleanup.callback(self.native.close)
            if validation:
                self._require_validation()
            cleanup.pop_all()

    @property
    def n_threads(self) -> int | None:
        """Count the CPU threads that run programs; None where a driver runs them."""
        return None

    def another(self) -> Device:
        """Open the same device once more, with a queue of its own. Raises GpuErrors."""
        return Device(str(self.info.index))

    def heaps(self) -> tuple[Heap, ...]:
        """Return the heaps as they are now: budgets change when other programs take memory."""
        with translate_errors("asking for the memory there is"):
            return tuple(Heap(**heap) for heap in self._instance.heaps(self.info.index))

    def allocate(self, intent: Intent, n_bytes: int, name: str) -> _native.Buffer:
        """Allocate a raw buffer of `n_bytes`; falls back to the intent's next fitting memory type.

        Raises OutOfMemoryError with what was asked and what the heap has, GpuError when the driver
        has no memory type for buffers like this.
        """
        extension = native()
        refused: list[tuple[int, _native.VulkanError]] = []
        for memory_type in memory_type_candidates(self.info, intent):
            try:
                return self.native.buffer(n_bytes, memory_type, name)
            except extension.DeviceLost:
                with translate_errors(f"allocating {name}"):
                    raise
            except extension.VulkanError as error:
                refused.append((memory_type, error))
        what = f"{n_bytes / 2**20:.0f} MiB of {intent} memory for {name} on {self.info.name}"
        raise self._not_allocated(what, refused) from refused[-1][1]

    def kernel(self, command: Dispatch, tensors: Sequence[_native.Tensor]) -> _native.Kernel:
        """Compile the kernel of a dispatch, bound to these tensors. Raises VulkanError."""
        return self.native.kernel(
            spirv_words(command.variant),
            tensors,
            list(command.constants),
            len(command.push),
            command.variant,
            command.subgroup_size,
        )

    @contextmanager
    def recorded(self, doing: str) -> Iterator[_native.Recorder]:
        """Record commands, run them, and wait. Raises GpuErrors, which name what it was `doing`."""
        with translate_errors(doing):
            recorder = self.native.recorder()
            yield recorder
            self.native.submit(recorder.finish()).wait()

    def _not_allocated(self, what: str, refused: list[tuple[int, _native.VulkanError]]) -> GpuError:
        """Make the error when every memory type was refused; running out counts before the rest."""
        full = [item for item in refused if item[1].result in OUT_OF_MEMORY]
        memory_type, error = (full or refused)[0]
        if not full:
            return GpuError(
                f"cannot allocate {what}: {error.call} failed with {error.result}",
                "update its driver, or choose another device with --device",
                error.result,
            )
        heap = self.info.heaps[self.info.memory_types[memory_type].heap]
        return OutOfMemoryError(
            f"cannot allocate {what} (heap of {heap.size / 2**20:.0f} MiB, {error.result})",
            "lower --ctx-size, close other GPU programs, or take a smaller model",
            error.result,
        )

    def _require_validation(self) -> None:
        """Raise GpuError unless the validation layer reports a missing barrier.

        The setting that switches synchronisation validation on has changed between releases of the
        layer, and variables or a settings file can switch it off. Its silence alone proves nothing.
        """
        with translate_errors("checking the validation layer"):
            _run_with_a_missing_barrier(self.native)
        messages = self._instance.messages()
        self._early_messages = [text for text in messages if HAZARD not in text]
        if len(messages) == len(self._early_messages):
            raise GpuError(
                "the validation layer did not report a barrier that was left out on purpose, "
                "so its silence would prove nothing",
                "remove VK_LAYER_... variables and vk_layer_settings.txt files that switch checks "
                "off, update the layer (Debian: vulkan-validationlayers), or drop --validation",
            )

    def validation_messages(self) -> list[str]:
        """List the validation layer's messages since the last call (empty without --validation)."""
        early, self._early_messages = self._early_messages, []
        return early + self._instance.messages()

    def finish(self) -> None:
        """Wait for submissions in flight, then free everything made from this device.

        Raises DeviceLostError when they do not end within seconds: nothing is freed then.
        """
        with translate_errors(f"closing {self.info.name}"):
            self.native.close()

    def close(self) -> None:
        """Finish, and let go of Vulkan. May be called twice."""
        try:
            self.finish()
        finally:
            self._instance.close()


def memory_type_candidates(device: DeviceInfo, intent: Intent) -> list[int]:
    """List the memory type indices that can serve an intent, best first; a sound driver has some.

    A CPU or integrated device has one memory, so `device` memory there is also mapped. On a
    discrete device it is never the host's: a full card is an error, not a tenfold slowdown. Nor are
    tables, which every workgroup would read over the bus, at about 26 us each: where none of the
    device's memory is mapped, their writes are staged.
    """
    scored = []
    for index, item in enumerate(device.memory_types):
        score = None if item.flags & EXCLUDED else _score(item, intent, device.is_uma)
        if score is not None:
            scored.append((-score, index))
    ranked = [index for _, index in sorted(scored)]
    if intent == "bar" and not device.is_uma:
        others = memory_type_candidates(device, "device")
        ranked += [index for index in others if index not in ranked]
    return ranked


def _score(item: MemoryType, intent: Intent, is_uma: bool) -> int | None:
    """Score a memory type for an intent: higher is better; None means unusable."""
    local = "DEVICE_LOCAL" in item.flags
    visible = "HOST_VISIBLE" in item.flags
    coherent = "HOST_COHERENT" in item.flags
    cached = "HOST_CACHED" in item.flags
    if intent == "device":
        # Mapped weights are written without a flush.
        if (not local and not is_uma) or (visible and not coherent):
            return None
        # Slots and weights keep out of the small mapped window of discrete cards.
        return 4 * local + 2 * (visible == is_uma) + cached * is_uma
    if not visible:
        return None
    if intent == "readback":
        return 4 * cached + 2 * coherent + (not local)
    if not coherent:
        return None
    if intent == "host":
        return 4 * (not local) + 2 * (not cached) if not is_uma else 4 * cached + 2 * local
    if not local and not is_uma:
        return None
    return 4 * local + 2 * (not cached)


def _run_with_a_missing_barrier(device: _native.Device) -> None:
    """Run a dispatch that reads what the dispatch before it wrote, with no barrier in between.

    The two run `finish`, the smallest kernel. Nothing depends on what it computes here: only the
    validation layer's messages count. Raises the extension's VulkanError.
    """
    n_words = 16  # shaders/include/params.glsl: the kernel reads its parameters from the first
    first, second, third = (device.tensor(n_words, "positive control") for _ in range(3))
    spirv = spirv_words("finish")
    recorder = device.recorder()
    for source, target in ((first, second), (second, third)):
        kernel = device.kernel(spirv, [source, target], [1], 0, "finish")
        recorder.dispatch(kernel, (1, 1, 1))
    device.submit(recorder.finish()).wait()
