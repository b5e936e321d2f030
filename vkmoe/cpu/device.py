"""The CPU as a device: what programs, buffers and submits are there, behind the GPU's own classes.

Memory is the host's, an address is a pointer, and a submit has run when it returns. Owns the
threads and the memory; what commands do is the subject of `native/`.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.cpu.variants import native, variant
from vkmoe.errors import GpuError, OutOfMemoryError
from vkmoe.facts import DeviceInfo, DeviceLimits, Heap, MemoryType
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Dispatch
from vkmoe.quants.types import BY_ID, TYPES

if TYPE_CHECKING:
    from vkmoe.cpu import _native

ALIGNMENT = 256  # of buffers, in bytes: what programs expect of any device
Bytes = NDArray[np.uint8]


@cache
def cpu_kernels() -> frozenset[str]:
    """Name the kernels that programs may use here."""
    return frozenset(native().kernels())


@cache
def input_form(type_name: str) -> str:
    """Name the type that vectors are brought into before weights of a type multiply them."""
    forms = {item["type"]: item["input"] for item in native().formats()}
    return BY_ID[forms[TYPES[type_name].ggml_id]].name


def n_cores() -> int:
    """Count the physical cores that this process may use: hyper-threads share their arithmetic."""
    usable = os.sched_getaffinity(0)
    cores = {_core(cpu) for cpu in usable}
    return max(1, len(cores))


def _core(cpu: int) -> str:
    """Name the core of a logical CPU by the CPUs it is made of; itself where that is not known."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


@cache
def cache_bytes() -> int:
    """Add up the largest caches of the CPUs that this process may use; 0: not known."""
    caches: dict[str, int] = {}  # by the CPUs that share one
    for cpu in os.sched_getaffinity(0):
        levels = sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))
        with suppress(OSError, ValueError, IndexError):
            size = (levels[-1] / "size").read_text().strip()
            shared = (levels[-1] / "shared_cpu_list").read_text()
            caches[shared] = int(size.removesuffix("K")) << 10
    return sum(caches.values())


@cache
def _model() -> str:
    """Name the processor as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    fields = (line.split(":", 1) for line in lines if line.startswith("model name"))
    return next((" ".join(field[1].split()) for field in fields), platform.machine())


def cpu_info(index: int = 0) -> DeviceInfo:
    """Describe the CPU as Vulkan's devices are described: one memory, which the host shares."""
    extension = native()
    compiled = ", ".join(filter(None, (extension.features(), platform.machine())))
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags = frozenset({"DEVICE_LOCAL", "HOST_VISIBLE", "HOST_COHERENT", "HOST_CACHED"})
    return DeviceInfo(
        index=index,
        name=f"CPU ({_model()})",
        type="cpu",
        vendor_id=0,
        driver_name="ggml",
        driver_info=f"{extension.ggml_version} ({variant()}: {compiled})",
        api_version=(1, 2, 0),
        subgroup_size=1,
        subgroup_arithmetic=False,
        features=frozenset({"buffer_device_address"}),
        heaps=(Heap(n_bytes, device_local=True),),
        memory_types=(MemoryType(0, flags),),
        limits=DeviceLimits(max_memory_allocation_size=n_bytes, max_buffer_size=n_bytes),
        subgroup_range=(1, 1),
        layout="file",
    )


class CpuDevice(Device):
    """Owns threads and memory, and runs programs on them. Use it as a context manager."""

    def __init__(self, n_threads: int | None = None, index: int = 0) -> None:
        """Start `n_threads`, by default one for each physical core."""
        self.info = cpu_info(index)
        self.native: Any = _Native(n_threads or n_cores())

    @property
    def n_threads(self) -> int:
        """Count the threads, of which one is the caller's."""
        return int(self.native.pool.n_threads)

    def allocate(self, intent: Intent, n_bytes: int, name: str) -> Any:
        """Allocate memory, whatever it is for."""
        return self.native.buffer(n_bytes, 0, name)

    def reach(self, data: Bytes) -> int:
        """Let programs read bytes of the host, contiguous, by the address this returns."""
        assert data.flags.c_contiguous, data.flags
        address = int(data.ctypes.data)
        self.native.regions.add(address, data.nbytes)
        self.native.reached.append(data)
        return address

    def scale(self, address: int, scale: float) -> None:
        """Multiply the weights of the matrix at an address, in programs that are recorded later."""
        self.native.regions.set_scale(address, scale)

    def borrow(self, data: Bytes) -> Borrowed:
        """Let programs copy to and from bytes of the host, contiguous, that others own."""
        assert data.flags.c_contiguous, data.flags
        return Borrowed(data)

    def kernel(self, command: Dispatch, tensors: Sequence[Any]) -> Any:
        """Return the kernel of a dispatch, and what it is bound to."""
        bindings = zip(KERNELS[command.kernel].bindings, tensors, strict=True)
        return Kernel(command, {binding.name: tensor for binding, tensor in bindings})

    def validation_messages(self) -> list[str]:
        """List nothing: commands are checked when they are recorded."""
        return []

    def finish(self) -> None:
        """Free everything made from this device."""
        self.native.close()

    def close(self) -> None:
        """Finish. May be called twice."""
        self.finish()


class CpuBytes:
    """Holds bytes that programs reach by name, or by address: a buffer, or a tensor of words."""

    mapped, memory_type = True, 0

    def __init__(self, native: _Native, n_bytes: int, name: str) -> None:
        try:
            room = np.zeros(n_bytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"cannot allocate {n_bytes / 2**20:,.0f} MiB of memory for {name}",
                "lower --ctx-size, close other programs, or take a smaller model",
            ) from error
        first = -room.ctypes.data % ALIGNMENT
        self.name = name
        self.bytes: Bytes = room[first : first + n_bytes]
        self.address = room.ctypes.data + first
        native.regions.add(self.address, n_bytes)
        self.close = weakref.finalize(self, native.regions.remove, self.address)

    @property
    def size(self) -> int:
        return self.bytes.size

    @property
    def n_words(self) -> int:
        return self.bytes.size // 4

    @property
    def words(self) -> NDArray[np.uint32]:
        """View all whole words."""
        return self.bytes[: 4 * self.n_words].view(np.uint32)

    def view(self) -> Bytes:
        """View the bytes in place."""
        return self.bytes

    def flush(self, offset: int, size: int) -> None:
        """Do nothing: what the host writes is there."""

    def invalidate(self, offset: int, size: int) -> None:
        """Do nothing: what programs wrote is there."""


class Borrowed(NamedTuple):
    """Holds bytes that programs reach by name; nothing reaches them by address."""

    bytes: Bytes


class Kernel(NamedTuple):
    """Names what a dispatch runs, and the tensors it is bound to."""

    command: Dispatch
    tensors: dict[str, CpuBytes]


class Recorder:
    """Records commands, each checked as it comes. Raises ValueError for what does not fit."""

    def __init__(self, native: _Native) -> None:
        self._native = native
        self._recording = native.extension.Recording(native.regions, native.scratch)
        self._waits = True  # whether the next command does

    def dispatch(self, kernel: Kernel, groups: tuple[int, int, int], push: bytes = b"") -> None:
        """Append a kernel with the push constants `push`, in so many workgroups."""
        command = kernel.command
        numbers = KERNELS[command.kernel].numbers_of(push, command.constants)
        tensors = {name: memory.words for name, memory in kernel.tensors.items()}
        self._recording.dispatch(
            command.kernel, command.variant, numbers, tensors, groups, self._waits
        )
        self._waits = False

    def barrier(self) -> None:
        """Let the next command wait for all before it."""
        self._waits = True

    def copy(
        self, source: CpuBytes, source_offset: int, target: CpuBytes, target_offset: int, size: int
    ) -> None:
        """Append a copy of bytes."""
        found = source.bytes[source_offset : source_offset + size]
        place = target.bytes[target_offset : target_offset + size]
        self._recording.copy(found, place, self._waits)
        self._waits = False

    def fill(self, target: CpuBytes, offset: int, size: int, word: int) -> None:
        """Append the filling of whole words with one."""
        place = target.words[offset // 4 : (offset + size) // 4]
        self._recording.fill(place, word, self._waits)
        self._waits = False

    def timestamp(self, index: int) -> None:
        """Do nothing: a recording is timed as a whole."""

    def finish(self) -> Recording:
        return Recording(self._recording)


class Recording:
    """Holds a program that can be run."""

    def __init__(self, program: _native.Recording) -> None:
        self._program, self._interval = program, (0, 0)

    def run(self, pool: _native.Pool) -> None:
        """Run it once."""
        began = time.perf_counter_ns()
        self._program.run(pool)
        self._interval = began, time.perf_counter_ns()

    def timestamps(self) -> tuple[int, int]:
        """Return when its last run began and ended, in nanoseconds."""
        return self._interval


class Submission:
    """Is a submit that has run."""

    def wait(self, expected_ns: int = 0, timeout_ns: int = 0) -> bool:
        return True

    def done(self) -> bool:
        return True

    def interval(self) -> None:
        """Return nothing: submits are not timed."""


class _Native:
    """Does what the extension's device does for a GPU (`vkmoe/gpu/_native.pyi`)."""

    n_queues, has_upload_queue, has_common_clock, lost = 1, False, False, False

    def __init__(self, n_threads: int) -> None:
        self.extension = native()
        try:
            self.pool = self.extension.Pool(n_threads)
        except RuntimeError as error:
            raise GpuError(
                f"the system does not start {n_threads} threads: {error}", "lower --threads"
            ) from error
        self.reached: list[Bytes] = []  # kept as long as programs may read them
        self.regions, self.scratch = self.extension.Regions(), self.extension.Scratch()

    def has_timestamps(self, queue: str = "compute") -> bool:
        return queue == "compute"

    def buffer(self, size: int, memory_type: int, name: str = "") -> CpuBytes:
        return CpuBytes(self, size, name)

    def tensor(self, n_words: int, name: str = "") -> CpuBytes:
        return CpuBytes(self, 4 * n_words, name)

    def recorder(self, n_timestamps: int = 0, queue: str = "compute") -> Recorder:
        return Recorder(self)

    def submit(
        self, recordings: Recording | Sequence[Recording], queue: str = "compute"
    ) -> Submission:
        given = [recordings] if isinstance(recordings, Recording) else recordings
        for recording in given:
            recording.run(self.pool)
        return Submission()

    def upload(self, copies: Sequence[Any], timed: bool = False) -> Submission:
        for (source, source_at, _), (target, target_at, _), size in copies:
            target.bytes[target_at : target_at + size] = source.bytes[source_at : source_at + size]
        return Submission()

    def wait_idle(self) -> None:
        """Do nothing: submits have run when they return."""

    def settle(self, timeout_ns: int, only: Submission | None = None) -> bool:
        return True

    def close(self, timeout_ns: int = 0) -> None:
        """Let go of what was reached; other memory goes with what holds it."""
        self.reached.clear()
