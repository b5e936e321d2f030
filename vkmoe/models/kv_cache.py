"""The memory of the KV cache: keys and values of every layer, or what both are compressed to.

Owns the memory. What lies where in it is the subject of ops/attention.py.
"""

from __future__ import annotations

from vkmoe.closing import Closing
from vkmoe.gpu.arena import Arena
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.models.decoder import KvAddresses

__all__ = ["KvCaches"]


class KvCaches(Closing):
    """The caches of every layer, cleared. Raises OutOfMemoryError with nothing left allocated."""

    def __init__(self, device: Device, n_layers: int, cache_bytes: int, n_caches: int = 2) -> None:
        """A layer has `n_caches` of `cache_bytes` each: keys and values, or one of both."""
        n_places = n_caches * n_layers
        self._arena = Arena(device, "device", "KV cache", n_places * cache_bytes)
        try:
            places = [self._arena.place(cache_bytes) for _ in range(n_places)]
            with translate_errors("clearing the KV cache"):
                recorder = device.native.recorder()
                for place in places:
                    recorder.fill(place.buffer, place.offset, cache_bytes, 0)
                device.native.submit(recorder.finish()).wait()
        except BaseException:
            self.close()
            raise
        found = [place.address for place in places]
        values = found[1::2] if n_caches == 2 else [0] * n_layers
        pairs = zip(found[::n_caches], values, strict=True)
        self.addresses = tuple(KvAddresses(*pair) for pair in pairs)

    def close(self) -> None:
        self._arena.close()
