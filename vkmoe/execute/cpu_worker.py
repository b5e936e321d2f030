"""Computes experts on the CPU, in turn with a GPU that hands rows over and joins what comes back.

Owns the host memory between the two and the CPU's recorded programs. When it is a layer's turn is
decided by the chain of submits (gpu/backend.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

import numpy as np

from vkmoe.batch import BatchKind, TokenBatch
from vkmoe.closing import Closing
from vkmoe.cpu.device import CpuDevice
from vkmoe.errors import GpuError
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.token_io import pack_params
from vkmoe.kernels.handover.operations import HANDED, JOINED
from vkmoe.models.cpu_experts import CpuExperts, CpuTensors
from vkmoe.models.weights import CpuWeights


class CpuWorker(Closing):
    """Computes the CPU's part of the experts of a batch, layer by layer."""

    def __init__(
        self, gpu: Backend, cpu: CpuDevice, tensors: CpuTensors, weights: CpuWeights
    ) -> None:
        """Take host memory for what goes between. Raises OutOfMemoryError."""
        self._pool = cpu.native.pool
        self._layers, self._table = tuple(weights.blocks), weights.table
        self._recorded: dict[BatchKind, dict[int, Any]] = {}  # by MoE layer
        self._current: dict[int, Any] = {}
        self.busy_ns = 0  # that computing took, since the start
        with ExitStack() as cleanup:
            allocate, enter = gpu.device.allocate, cleanup.callback
            self._handed = allocate("readback", tensors.handed.n_bytes, HANDED)
            enter(self._handed.close)
            self._joined = allocate("host", tensors.sums.n_bytes, JOINED)
            enter(self._joined.close)
            self._backend = Backend(cpu)
            for name, buffer in ((HANDED, self._handed), (JOINED, self._joined)):
                gpu.bind(name, buffer)
                self._backend.bind(name, cpu.borrow(buffer.view()))  # type: ignore[arg-type]
            ones = cpu.reach(np.ones(tensors.spec.width, np.float32).view(np.uint8))
            self._programs = CpuExperts(tensors, weights, ones)
            self._backend.tensor(tensors.zeros)  # which no kernel is bound to
            params: Any = self._backend.tensor(tensors.space.params)
            self._params = params.words.data
            self._cleanup = cleanup.pop_all()

    def record(self, kind: BatchKind) -> None:
        """Record the programs of a kind of batches, unless that was done."""
        kind = kind._replace(n_logits=0)
        if kind not in self._recorded:
            self._recorded[kind] = {
                layer: self._backend.record(self._programs.program(kind, layer))
                for layer in self._layers
            }

    def begin(self, kind: BatchKind, batch: TokenBatch) -> None:
        """Make ready for a batch. Must hold: its kind is recorded."""
        self._current = self._recorded[kind._replace(n_logits=0)]
        pack_params(self._params, batch, self._table.address, serial=0)

    def compute(self, layer: int) -> None:
        """Compute the experts of a MoE layer for the rows that were handed over.

        Must hold: they are there, and nothing reads what was given back before. Raises GpuError
        where the CPU's threads fail.
        """
        began = perf_counter_ns()
        self._handed.invalidate(0, self._handed.size)
        try:
            self._current[layer].run(self._pool)
        except (RuntimeError, MemoryError) as error:
            raise GpuError(
                f"the CPU could not compute experts: {error}", "close other programs, and try again"
            ) from error
        self._joined.flush(0, self._joined.size)
        self.busy_ns += perf_counter_ns() - began

    def close(self) -> None:
        """Free the memory. Must hold: no submit is in flight."""
        self._recorded.clear()
        self._current = {}
        if hasattr(self, "_backend"):
            del self._backend  # with its views of that memory
        self._cleanup.close()
