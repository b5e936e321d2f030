"""Writes experts back from the device to host memory, where these two hold the model together.

An expert that leaves its slot must lie somewhere else. So those that are next to leave are copied
to host memory ahead of that, into places that other experts can do without: they are in slots.
Which ones is chosen in decide/backing.py. The table leads to an expert's slot as long as it has
one, so nothing reads a place that is written.
"""

from __future__ import annotations

from math import inf

from vkmoe.experts.decide.keys import Keys
from vkmoe.experts.decide.locations import Move
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.store.copies import Uploader
from vkmoe.experts.store.tier import HostPool, Tier, TierCounters


class Exchange:
    """Gives experts in slots a home again, so that they can leave. Owns the copies under way."""

    def __init__(
        self,
        residency: Residency,
        device: Tier,
        pool: HostPool,
        uploads: Uploader,
        wait: bool,
        counters: TierCounters,
    ) -> None:
        """Begin when all experts are in slots or in the `pool`, which reads no file any more.

        `wait`: the next decision waits for the copies, which `counters` count.
        """
        self._backing = residency.exchange_with(pool.locations)
        self._residency, self._pool, self._wait = residency, pool, wait
        self.tier = Tier(
            pool.tier.table,
            pool.locations,
            pool.tier.slots,
            uploads,
            source=lambda key: device.slot(key).memory,
            span_bytes=device.span_bytes,
            max_copy_bytes=device.max_copy_bytes,
            failure="writing experts back to host memory failed, they stay on the GPU",
            readable=residency.locations,
            counters=counters,
        )

    def collect(self) -> None:
        """Note what has arrived: those experts can leave. Waits for all, the plain way."""
        self.tier.start_waiting()
        self.tier.collect(self._wait)

    def look_ahead(self, budget_bytes: float = inf) -> None:
        """Begin to write back the experts that are next to leave, `budget_bytes` of them at most.

        To be called once for each run, when it is decided what moves for it.
        """
        sizes, n_experts = self.tier.span_bytes, self._residency.space.n_experts
        moves = []
        for move in self._residency.to_back():
            budget_bytes -= sizes[move.key // n_experts]
            if budget_bytes < 0:
                break
            moves.append(move)
        self._bring(moves)

    def has_room_for(self, keys: Keys) -> bool:
        """Return whether all these experts can leave their slots once they are written back."""
        return self._backing.has_room(keys)

    def back(self, keys: Keys) -> bool:
        """Write experts back that are to leave, and wait; return whether all of them can leave now.

        Raises DeviceLostError. Must hold: no submit is in flight.
        """
        self._finish()
        self._bring(self._backing.for_leaving(keys, self._residency.leaving_order()))
        self._finish()
        return not self._backing.unbacked[keys].any()

    def _finish(self) -> None:
        """Carry out all that waits: for a submit, which has ended, or for room in a queue."""
        n_before = -1
        while (n_waiting := len(self.tier.locations.waiting())) != n_before:
            n_before = n_waiting
            self.tier.start_waiting()
            self.tier.collect(wait=True)

    def _bring(self, moves: list[Move]) -> None:
        if moves:
            self._pool.residency.enter(moves)
            self.tier.bring(moves)
