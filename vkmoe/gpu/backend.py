"""Lowers programs to recorded Kompute sequences and runs them; the only place commands meet memory.

Owns the tensors and buffers behind names, and the compiled kernels, for all programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from vkmoe.gpu.device import Device, translate_errors, translated, vulkan_errors
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Command, Copy, Dispatch, Program, TensorRef
from vkmoe.gpu.transfer import Transfer
from vkmoe.interrupts import checkpoint, result_of, works_at_checkpoints
from vkmoe.quants.code_books import code_books

if TYPE_CHECKING:
    from vkmoe.gpu import _native

# The extension's classes, for type annotations outside this package.
Buffer: TypeAlias = "_native.Buffer"
Recorder: TypeAlias = "_native.Recorder"
Recording: TypeAlias = "_native.Recording"
Submission: TypeAlias = "_native.Submission"

N_COMPILERS = 4  # threads
# How long submits may go on after an error beside them; CPU drivers are slow, but they do not hang.
SETTLE_NS, SETTLE_CPU_NS = 5_000_000_000, 30_000_000_000
SOON_NS = 1  # an expected time that has the host poll at once, where polling takes nothing away


class Link(NamedTuple):
    """Describes a recording in a chain, and what the host does when it has run, if anything.

    One that `waits` begins when all such work before it is done; the others do not wait for it.
    """

    recording: Recording
    work: Callable[[], None] | None = None
    waits: bool = False


class Backend:
    """Binds names to memory, compiles each kernel once, records programs."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._tensors: dict[str, _native.Tensor] = {}
        self._buffers: dict[str, _native.Buffer] = {}
        self._kernels: dict[tuple[object, ...], _native.Kernel] = {}
        self._code_books: _native.Buffer | None = None

    def bind(self, name: str, buffer: _native.Buffer) -> None:
        """Name a raw buffer so that copies can refer to it."""
        assert name not in self._tensors and name not in self._buffers, name
        self._buffers[name] = buffer

    def tensor(self, ref: TensorRef) -> _native.Tensor:
        """Return the memory behind a tensor proxy, made at first use."""
        known = self._tensors.get(ref.name)
        if known is None:
            with translate_errors(f"allocating {ref.n_bytes} bytes for {ref.name}"):
                known = self.device.native.tensor(ref.n_words, ref.name)
            self._tensors[ref.name] = known
        assert known.n_words == ref.n_words, (ref, known.n_words)
        return known

    def clear(self, ref: TensorRef) -> None:
        """Fill the memory behind a tensor proxy with zeros, now. Raises GpuErrors."""
        memory = self.tensor(ref)
        with translate_errors(f"clearing {ref.name}"):
            recorder = self.device.native.recorder()
            recorder.fill(memory, 0, ref.n_bytes, 0)
            self.device.native.submit(recorder.finish()).wait()

    def record(
        self, program: Program, barriers: list[bool] | None = None, timed: bool = False
    ) -> _native.Recording:
        """Lower a program. `barriers` overrides the hazard plan (for comparisons and tests).

        A `timed` recording has timestamps at begin and end, where the device has any at all.
        """
        timed = timed and self.device.native.has_timestamps()
        planned = plan_barriers(program.commands) if barriers is None else barriers
        commands = self._with_code_books(program.commands)
        self._compile(commands)
        with translate_errors(f"recording {program.name}"):
            recorder = self.device.native.recorder(n_timestamps=2 if timed else 0)
            if timed:
                recorder.timestamp(0)
            for command, barrier in zip(commands, planned, strict=True):
                if barrier:
                    recorder.barrier()
                if isinstance(command, Copy):
                    source, target = command.source, command.target
                    before, after = map(self._memory, (source.resource, target.resource))
                    n_bytes = source.end - source.start
                    recorder.copy(before, source.start, after, target.start, n_bytes)
                else:
                    kernel = self._kernels[_kernel_key(command)]
                    recorder.dispatch(kernel, command.groups, command.push)
            if timed:
                recorder.timestamp(1)
            return recorder.finish()

    @works_at_checkpoints
    def run(
        self,
        *recordings: _native.Recording,
        expected_ns: int = 0,
        meanwhile: Callable[[], None] | None = None,
        as_one: bool = False,
    ) -> list[_native.Submission]:
        """Submit one behind the other, and wait for the last; every one's result is checked.

        `as_one`: in one submit, which drivers then have to let run for as long as all take.

        Each sees what those before it wrote. `meanwhile` is called before the wait; it must not
        touch what the submits read or write. Raises DeviceLostError and other GpuErrors, once all
        submits have ended: the host must not touch what they read. What does not end within seconds
        loses the device, and its memory is kept.
        """
        try:  # no context manager: this is the one thing done for every token
            submit = self.device.native.submit
            batches = [recordings] if as_one else recordings
            submissions = [submit(batch) for batch in batches]
            if meanwhile is not None:
                meanwhile()
            submissions[-1].wait(expected_ns)
            for earlier in submissions[:-1]:
                earlier.wait()
            return submissions
        except BaseException as error:
            self._give_up(error)
            raise

    @works_at_checkpoints
    def run_chain(
        self, links: Sequence[Link], meanwhile: Callable[[], None] | None = None
    ) -> list[_native.Submission]:
        """Submit all recordings in order, do the host's work between them, and wait for the end.

        As `run` says of `meanwhile` and of errors; one of the host's work is passed on in the same
        way, and so is Ctrl-C before a part of it.

        One that waits is submitted behind the host's work: what the host writes is visible to what
        is submitted later (Vulkan specification, "Host Write Ordering Guarantees"). Queued before,
        behind a semaphore that the host signals, it computed wrong tokens with NVIDIA's driver 580.
        """
        expected_ns = 0 if self.device.info.is_cpu else SOON_NS
        submissions: list[_native.Submission] = []
        asked: list[tuple[_native.Submission, Callable[[], None]]] = []
        first = [] if meanwhile is None else [meanwhile]

        def answer() -> None:
            while first:
                first.pop()()
            for submission, work in asked:
                submission.wait(expected_ns)
                checkpoint()
                work()
            asked.clear()

        try:
            for link in links:
                if link.waits:
                    answer()
                submissions.append(self.device.native.submit(link.recording))
                if link.work is not None:
                    asked.append((submissions[-1], link.work))
            answer()
            for submission in reversed(submissions):
                submission.wait()
            return submissions
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Wait for what an error left in flight; raise another error if that is what it means."""
        settle_ns = SETTLE_CPU_NS if self.device.info.is_cpu else SETTLE_NS
        with suppress(RuntimeError):  # the first error is the one to tell
            self.device.native.settle(settle_ns)
        if isinstance(error, vulkan_errors()):
            raise translated(error, "running a program") from error

    def _memory(self, name: str) -> _native.Buffer | _native.Tensor:
        return self._buffers[name] if name in self._buffers else self._tensors[name]

    def _with_code_books(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Add the addresses that kernels of GPUs read; CPUs have code books of their own."""
        if self.device.info.layout == "file":
            return commands
        return [
            each.with_code_book(self._code_books_address) if isinstance(each, Dispatch) else each
            for each in commands
        ]

    def _code_books_address(self) -> int:
        """Return the address of all code books, which are placed at the first call."""
        if self._code_books is None:
            words, _ = code_books()
            self._code_books = self.device.allocate("device", words.nbytes, "code books")
            with Transfer(self.device, words.nbytes) as transfer:
                transfer.write(self._code_books, 0, words.view(np.uint8))
                transfer.flush()
        return self._code_books.address

    def _compile(self, commands: Sequence[Command]) -> None:
        """Compile the kernels that are not there yet, several at a time: drivers take long."""
        used = {_kernel_key(c): c for c in commands if isinstance(c, Dispatch)}
        missing = {key: command for key, command in used.items() if key not in self._kernels}
        for command in missing.values():
            for ref in command.tensors:
                self.tensor(ref)
        pool = ThreadPoolExecutor(N_COMPILERS, "compile")
        try:
            jobs = {key: pool.submit(self._make_kernel, missing[key]) for key in missing}
            for key, job in jobs.items():
                self._kernels[key] = result_of(job)
        finally:  # after Ctrl-C or a failure: jobs that have not begun are dropped
            pool.shutdown(cancel_futures=True)

    def _make_kernel(self, command: Dispatch) -> _native.Kernel:
        tensors = [self.tensor(ref) for ref in command.tensors]
        with translate_errors(f"compiling {command.variant}"):
            return self.device.kernel(command, tensors)


def _kernel_key(command: Dispatch) -> tuple[object, ...]:
    """Return the key by which two dispatches use the same kernel object."""
    names = tuple(tensor.name for tensor in command.tensors)
    return (command.variant, command.constants, names, len(command.push), command.subgroup_size)
