"""Typed face of the native extension: Vulkan through Kompute's C++ classes, with our submission.

Methods raise VulkanError for a failed Vulkan call, DeviceLost once the driver has reset the
device, ValueError for arguments that do not fit, RuntimeError for something already closed.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

kompute_version: str
Place: TypeAlias = tuple[Buffer | Tensor, int, int]  # an offset, and the address that makes

class VulkanError(RuntimeError):
    """A Vulkan call failed: `call` by name, with the VkResult named `result`."""

    result: str
    call: str

class DeviceLost(VulkanError):
    """VK_ERROR_DEVICE_LOST, from any call; the device can only be closed."""

def live_objects() -> dict[str, int]:
    """Live Vulkan objects by kind, those made by Kompute included; {} when there are none."""

def inject_failure(
    call: str, after: int = 0, result: str = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
) -> None:
    """For tests: the (after + 1)-th future `call` is not made and yields `result`, once."""

def clear_injections() -> None:
    """Forget the injections that have not struck yet."""

class Instance:
    """The Vulkan instance; `validation` asks for the Khronos layer with synchronisation checks."""

    def __init__(self, validation: bool = False) -> None: ...
    def messages(self) -> list[str]:
        """Validation warnings and errors since the last call."""

    def physical_devices(self) -> list[dict[str, Any]]:
        """What each device is and can do, as plain data."""

    def heaps(self, index: int) -> list[dict[str, Any]]:
        """The heaps of a device as they are now. Raises IndexError if there is no such device."""

    def open(self, index: int, features: list[str]) -> Device:
        """Open a device with just these features.

        Raises VulkanError that lists the features it lacks, ValueError for an unknown name,
        IndexError if there is no such device.
        """

    def close(self) -> None:
        """Let go of the instance; it is destroyed with the last open device."""

class Device:
    """An open device. All that is made from it is released by `close`."""

    @property
    def n_queues(self) -> int: ...
    @property
    def has_upload_queue(self) -> bool: ...
    def has_timestamps(self, queue: str = "compute") -> bool:
        """Whether recordings for queue "compute" or "upload" can be timed."""

    @property
    def has_common_clock(self) -> bool:
        """Whether timestamps of both queues may be compared.

        Vulkan 1.2 itself orders timestamps within a submit only, and calls those of two queues not
        comparable. With calibrated timestamps enabled (here, wherever the device offers them) one
        that happens after another is not lower, whichever submits and queues they belong to. False
        without them, on two queues: then intervals of different queues say nothing of overlap.
        """

    @property
    def lost(self) -> bool: ...
    def memory_bytes(self) -> list[int]:
        """Bytes allocated from each heap by this device, as the driver rounded them; tensors too.

        After `close` what live views still hold.
        """

    def memory_peak_bytes(self) -> list[int]:
        """The most bytes ever allocated at once, by heap."""

    def buffer(self, size: int, memory_type: int, name: str = "") -> Buffer:
        """A raw buffer of `size` bytes with memory of its own, mapped if host visible."""

    def tensor(self, n_words: int, name: str = "") -> Tensor:
        """A descriptor-bound buffer of 4-byte words in device memory."""

    def kernel(
        self,
        spirv: bytes,
        tensors: Sequence[Tensor],
        spec: Sequence[int],
        push_bytes: int,
        name: str = "",
        subgroup_size: int = 0,
        texts: bool = False,
    ) -> Kernel:
        """A pipeline: `tensors` are bindings 0.., `spec` specialisation constants 0.. (uint32).

        `subgroup_size`: its workgroups are whole subgroups of this size (0: as the driver likes);
        needs the features "subgroup_size_control" and "compute_full_subgroups". ValueError for a
        size that the device does not take. `texts`: the compiler keeps its texts for
        `Kernel.executables`; needs the feature "pipeline_statistics".
        """

    def recorder(self, n_timestamps: int = 0, queue: str = "compute") -> Recorder:
        """Begin a recording with a full memory barrier, for queue "compute" or "upload".

        Upload recordings reuse their command buffers; at most 64 may be alive. ValueError if there
        are to be timestamps and the queue has none (see `has_timestamps`).
        """

    @overload
    def submit(self, recording: Recording, queue: str = "compute") -> Submission:
        """Submit a recording, which must not be in flight."""

    @overload
    def submit(self, recordings: Sequence[Recording], queue: str = "compute") -> Submission:
        """Submit several as one, each seeing what those before it wrote: one fence for all."""

    def upload(self, copies: Sequence[tuple[Place, Place, int]], timed: bool = False) -> Submission:
        """Copy between (buffer, offset, address) and another such place, so many bytes each.

        As a recording of `Recorder.copy` for each, submitted to the upload queue. `timed` gives the
        submission an `interval`, where that queue has timestamps.
        """

    def wait_idle(self) -> None:
        """Wait for all submissions that are in flight now; interruptible.

        What other threads submit meanwhile is not waited for, here and in `settle`.
        """

    def settle(self, timeout_ns: int, only: Submission | None = None) -> bool:
        """Wait for the submissions in flight, deaf to Ctrl-C, at most `timeout_ns`.

        Chains are let go, unless it is for `only` one submission, as a thread beside them waits.
        False when that runs out: the device counts as lost from then on, and what was made from it
        stays alive until `close`, whoever lets go of it.
        """

    def close(self, timeout_ns: int = 5_000_000_000) -> None:
        """Wait for submissions in flight and release everything but memory under live views.

        Other threads that use the device meanwhile get RuntimeError. Raises VulkanError
        "VK_TIMEOUT" if some remain: then nothing is released, ever. Does nothing the second time.
        """

class Buffer:
    @property
    def size(self) -> int: ...
    @property
    def address(self) -> int:
        """Device address; 0 without the feature buffer_device_address."""

    @property
    def memory_type(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def mapped(self) -> bool: ...
    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes [size] in place; keeps the memory alive. RuntimeError if not mapped."""

    def flush(self, offset: int, size: int) -> None:
        """Make host writes visible to the device; free on coherent memory."""

    def invalidate(self, offset: int, size: int) -> None:
        """Make device writes visible to the host; free on coherent memory."""

    def close(self) -> None:
        """Let go of the buffer; recordings that use it keep it alive."""

class Tensor:
    @property
    def n_words(self) -> int: ...
    @property
    def name(self) -> str: ...

class Executable:
    """What a driver's compiler made of a pipeline, or of one part of it; names are the driver's."""

    @property
    def name(self) -> str: ...
    @property
    def subgroup_size(self) -> int: ...
    @property
    def statistics(self) -> dict[str, float]: ...
    @property
    def texts(self) -> dict[str, str]:
        """Stages of compilation by name, assembly among them; {} for a kernel without `texts`."""

class Kernel:
    @property
    def name(self) -> str: ...
    def executables(self) -> list[Executable]:
        """What the compiler made of it; RuntimeError without the feature "pipeline_statistics"."""

class Recorder:
    def dispatch(self, kernel: Kernel, groups: tuple[int, int, int], push: bytes = b"") -> None: ...
    def barrier(self) -> None:
        """All commands before it are done and visible to all after it."""

    def copy(
        self,
        src: Buffer | Tensor,
        src_offset: int,
        dst: Buffer | Tensor,
        dst_offset: int,
        size: int,
    ) -> None: ...
    def fill(self, dst: Buffer | Tensor, offset: int, size: int, word: int) -> None: ...
    def timestamp(self, index: int) -> None:
        """Take the time at which all earlier commands are done."""

    def finish(self) -> Recording:
        """End with a barrier to the host; the recording keeps all it uses alive."""

class Recording:
    def timestamps(self) -> list[int]:
        """Nanoseconds [n_timestamps] of the last submit; RuntimeError before it has finished."""

class Submission:
    def wait(self, expected_ns: int = 0, timeout_ns: int = 0) -> bool:
        """Wait without the GIL, interruptibly; False if `timeout_ns` (0: no limit) ran out.

        With 0 < expected_ns < 20 ms it sleeps until 80 % of that time after the submit, if that is
        at least 0.2 ms, then polls.
        """

    def done(self) -> bool:
        """True once the submit has finished; never waits."""

    def interval(self) -> tuple[int, int] | None:
        """When it began and ended: by two timestamps each of its recordings, in nanoseconds.

        Earlier submits of the same queue have ended at the first. None unless there are two in the
        first and in the last recording, or where the device's counter overflowed between them.
        RuntimeError until `wait` or `done` has said that the submit is finished. For intervals of
        two queues see `Device.has_common_clock`.
        """
