"""The memory of the KV cache: keys and values of every layer, in device memory.

Owns the memory. What lies where in it is the subject of ops/attention.py.
"""

from __future__ import annotations

from vkmoe.closing import Closing
from vkmoe.gpu.arena import Arena
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.models.decoder import KvAddresses

__all__ = ["KvCaches"]


class KvCaches(Closing):
    """K and V of every layer, cleared. Raises OutOfMemoryError with nothing left allocated."""

    def __init__(self, device: Device, n_layers: int, cache_bytes: int) -> None:
        """`cache_bytes` are those of one layer's keys, and of its values."""
        self._arena = Arena(device, "device", "KV cache", 2 * n_layers * cache_bytes)
        try:
            places = [self._arena.place(cache_bytes) for _ in range(2 * n_layers)]
            with translate_errors("clearing the KV cache"):
                recorder = device.native.recorder()
                for place in places:
                    recorder.fill(place.buffer, place.offset, cache_bytes, 0)
                device.native.submit(recorder.finish()).wait()
        except BaseException:
            self.close()
            raise
        pairs = zip(places[::2], places[1::2], strict=True)
        self.addresses = tuple(KvAddresses(keys.address, values.address) for keys, values in pairs)

    def close(self) -> None:
        self._arena.close()
