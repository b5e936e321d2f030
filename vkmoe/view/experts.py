"""Shows where the experts of an engine are and what they do, as plain values for JSON.

Owns the form of what is shown; `docs/expert-view.md` describes it. All methods are called on the
engine's thread, between two runs. Layers count MoE layers from 0 in all of it; `layers` holds the
model's own numbers.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from vkmoe.choices import POLICIES_IN_WORDS
from vkmoe.engine import Engine
from vkmoe.experts.records.profiler import Tally
from vkmoe.experts.records.watch import (
    BY_CPU,
    IN_DEVICE,
    IN_FILE,
    IN_HOST,
    ExpertWatch,
    Places,
    Use,
)
from vkmoe.modes import Hybrid
from vkmoe.view.changes import change_experts, refusal
from vkmoe.view.why import Served, explain
from vkmoe.weights.sizes import weight_bytes

MAX_USES = 16_384  # in one answer
NO_EXPERTS = "the model has no experts: every token uses all of it"
RESET = {"reset": True}


class ExpertView:
    """Shows the experts of one engine; one view serves all that look at it.

    The engine notes what moves from the first `snapshot` on, until nothing asks for ten seconds.
    """

    def __init__(self, engine: Engine) -> None:
        """Show an engine; recording begins with the first snapshot."""
        self._engine, self._spec = engine, engine.spec
        self._span_bytes = weight_bytes(engine.model.tensors).spans
        self._version = 0  # the last that any watch has given

    # ----- what is shown -----

    def snapshot(self) -> dict[str, Any]:
        """Return all there is to show now. Plain values; `reason` says why there are no experts."""
        engine, experts = self._engine, self._spec.experts
        mode, plan = engine.plan.mode, engine.plan
        watch = self._watching()
        why_not, remedy = refusal(engine)
        shown = {
            "version": watch.version if watch is not None else 0,
            "model": self._spec.name,
            "architecture": self._spec.architecture,
            "device": engine.device.info.name,
            "reason": NO_EXPERTS if experts is None else "",
            "layers": [*self._spec.moe_layers],
            "n_experts": experts.n_experts if experts is not None else 0,
            "n_used": experts.n_used if experts is not None else 0,
            "mode": {
                "name": mode.name,
                "experts_in": mode.experts_in,
                "miss": mode.miss,
                "promotes": mode.promotes,
                "reason": mode.reason,
                "why": plan.mode_reason,
            },
            "executor": plan.executor,
            "expert_bytes": [*self._span_bytes],
            "host_slots": sum(plan.host_slots),
            "cpu_layers": plan.cpu_layers,
            "cannot_change": {"reason": why_not, "hint": remedy} if why_not else None,
            "policies": {**POLICIES_IN_WORDS},
            "places": [] if watch is None else self._places(watch.places),
        }
        return {**shown, **self._settings(), **self._heat(), **self._totals(watch)}

    def deltas(self, since: int) -> dict[str, Any]:
        """Return the changes since a version that a snapshot or an earlier answer named.

        {"reset": True} where that is too long ago, or was never given: take a snapshot.
        """
        watch = self._engine.experts.watch
        if self._spec.experts is None:
            return {"version": 0, "moves": [], "uses": [], **self._totals(None)}
        if watch is None or isinstance(since, bool) or not isinstance(since, int):
            return {**RESET}
        watch.ask()
        if not watch.knows(since):
            return {**RESET}
        self._version = watch.version
        n_experts = self._experts_per_layer
        uses = _listed(watch.uses(since))
        shown: dict[str, Any] = {
            "version": watch.version,
            "moves": [
                [*divmod(key, n_experts), chr(place), reason]
                for key, place, reason in watch.changes(since)
            ],
            "uses": uses,
            "uses_left_out": watch.n_uses(since) - len(uses),
        }
        if watch.settings_version > since:
            shown |= self._settings()
        if watch.runs_version > since:
            shown |= self._heat()
        return shown | self._totals(watch)

    def why(self) -> dict[str, Any]:
        """Return where the time of the last decoded tokens went, and what would change it."""
        engine = self._engine
        plan, link = engine.plan, engine.link
        speed = None
        if link is not None:
            gathers = plan.mode.gathers and link.gather_bytes_per_second > 0
            speed = link.gather_bytes_per_second if gathers else link.read_bytes_per_second
        served = Served(
            plan.mode,
            speed,
            engine.device.info.layout == "file",
            engine.overlap is None,
            plan.executor == "stepped",
            engine.experts.residency.settings.policy,
            engine.plan.cpu_layers > 0,
        )
        return explain(engine.times.steps(), served)

    # ----- what is changed -----

    def change(
        self, slots: Any = None, policy: Any = None, pin: Any = None, unpin: Any = None
    ) -> dict[str, Any]:
        """Change how many slots each layer uses, the policy, and pins; None for what stays.

        `pin` and `unpin` are lists of [layer, expert]. Pinned experts get their slots when the next
        token has shown what else is used. Returns what is in force. Raises UsageError, with nothing
        changed.
        """
        tracker = change_experts(self._engine, slots, policy, pin, unpin)
        if tracker is not None and tracker.watch is not None:
            tracker.watch.look()
        return self._settings()

    def close(self) -> None:
        """Note nothing any more. May be called twice; a snapshot begins anew."""
        self._engine.experts.unwatch()

    # ----- inside -----

    def _watching(self) -> ExpertWatch | None:
        """Return the watch, begun now if need be; None where there are no experts."""
        tracker = self._engine.experts
        if self._spec.experts is None:
            return None
        if tracker.watch is None:
            cache = tracker.cache
            pool = cache.pool.residency if cache and cache.pool else None
            # Versions of an earlier watch are unknown to this one.
            elsewhere, first = self._elsewhere(), self._version + 1
            tracker.watch = ExpertWatch(tracker.residency, pool, elsewhere, first)
        tracker.watch.ask()
        self._version = tracker.watch.version
        return tracker.watch

    @property
    def _experts_per_layer(self) -> int:
        return self._engine.experts.residency.space.n_experts

    def _elsewhere(self) -> Places:
        """Return where experts are read from that have no slot [n_keys]."""
        engine, plan = self._engine, self._engine.plan
        space, mode = engine.experts.residency.space, plan.mode
        letter = IN_HOST
        if engine.device.info.layout == "file" or isinstance(mode, Hybrid):
            letter = BY_CPU
        elif not mode.can_miss:
            letter = IN_DEVICE
        elif plan.host_slots:
            letter = IN_FILE
        found = np.full(space.n_keys, letter, np.uint8)
        if not mode.has_slots:
            found[: plan.cpu_layers * space.n_experts] = BY_CPU
        return found

    def _places(self, places: Places) -> list[str]:
        text, n = places.tobytes().decode("ascii"), self._experts_per_layer
        return [text[first : first + n] for first in range(0, len(text), n)]

    def _settings(self) -> dict[str, Any]:
        """Return what `change` changes."""
        tracker = self._engine.experts
        residency, n_layers = tracker.residency, len(self._spec.moe_layers)
        slots, most = [0] * n_layers, [0] * n_layers
        pools = residency.locations.pools
        if tracker.cache is not None:
            capacities = residency.locations.capacities.tolist()
            both = zip(pools, capacities, tracker.cache.most_slots, strict=True)
            for pool, n, n_most in both:
                for layer in pool.layers:
                    slots[layer], most[layer] = n // len(pool.layers), n_most // len(pool.layers)
        return {
            "slots": slots,
            "most_slots": most,
            "shared_slots": any(len(pool.layers) > 1 for pool in pools),
            "policy": residency.settings.policy if tracker.cache is not None else None,
            "pinned": residency.pinned if self._spec.experts is not None else [],
        }

    def _heat(self) -> dict[str, Any]:
        """Return how much each expert was used of late, 255 for the most used: base64 per layer."""
        if self._spec.experts is None:
            return {"heat": []}
        values = self._engine.experts.residency.counts.values()
        top = values.max(initial=0.0)
        scaled = np.rint(values * (255 / top)) if top > 0 else np.zeros(len(values))
        rows = scaled.astype(np.uint8).reshape(-1, self._experts_per_layer)
        return {"heat": [b64encode(row.tobytes()).decode("ascii") for row in rows]}

    def _totals(self, watch: ExpertWatch | None) -> dict[str, Any]:
        """Return hits and bytes since the model was loaded."""
        profiler = self._engine.profiler
        if profiler is None or watch is None:
            nothing = _rate(Tally(0, 0))
            return {"hits": {"total": nothing, "layers": [], "last_second": nothing}, "bytes": {}}
        uses, hits = profiler.counts.sum(axis=2).tolist()
        return {
            "hits": {
                "total": _rate(Tally(sum(uses), sum(hits))),
                "layers": [[*pair] for pair in zip(uses, hits, strict=True)],
                "last_second": _rate(watch.tally_of(1.0)),
            },
            "bytes": bytes_by_way(self._engine),
        }


def bytes_by_way(engine: Engine) -> dict[str, int]:
    """Return the bytes of experts since the model was loaded, by how they were served.

    Reads totals alone, and may be called on any thread.
    """
    tracker, mode = engine.experts, engine.plan.mode
    cache, missed = tracker.cache, tracker.totals.missed_bytes
    by_cpu = mode.by_cpu
    pool = cache.pool.tier.counters if cache is not None and cache.pool is not None else None
    return {
        "read_through": 0 if by_cpu else missed,
        "computed_by_cpu": missed if by_cpu else 0,
        "copied": cache.counters.upload_bytes if cache is not None else 0,
        "landed": cache.landed_bytes if cache is not None else 0,
        "read_from_file": pool.copied_bytes if pool is not None else 0,
    }


def _rate(tally: Tally) -> dict[str, Any]:
    return {"uses": tally.n_uses, "hits": tally.n_hits, "rate": tally.hit_rate}


def _listed(found: list[Use]) -> list[list[int]]:
    """List uses as [layer, expert, 1 for a hit], in order: the last ones, as far as there is room.

    Within a token they go by layer and rank.
    """
    if not found:
        return []
    ids = np.concatenate([use.routing for use in found])
    hits = np.concatenate([use.hits for use in found])
    n_tokens, n_layers, n_used = ids.shape
    n_taken = min(n_tokens, MAX_USES // (n_layers * n_used))
    listed = np.empty((n_taken, n_layers, n_used, 3), np.int64)
    listed[..., 0] = np.arange(n_layers)[:, None]
    listed[..., 1] = ids[n_tokens - n_taken :]
    listed[..., 2] = hits[n_tokens - n_taken :]
    rows: list[list[int]] = listed.reshape(-1, 3).tolist()
    return rows
