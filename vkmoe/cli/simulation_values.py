"""What `vkmoe simulate` found, as values for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.cli.simulation_guesses import guess_values
from vkmoe.experts.study.accuracy import Accuracies
from vkmoe.experts.study.locality import Locality
from vkmoe.experts.study.replay import Misses, Rung, SimulationResult, Sweep, bend_of_curve, misses
from vkmoe.experts.study.trace import Trace

__all__ = ["as_document"]

Counts = NDArray[np.int64]


def as_document(sweep: Sweep, local: Locality, right: Accuracies) -> dict[str, Any]:
    """All of it, per layer too; hit rates from 0 to 1. None where a trace is too short."""
    trace, header = sweep.trace, sweep.trace.header
    return {
        "model": header.model,
        "architecture": header.architecture,
        "layer_numbers": list(header.layer_numbers),
        "n_experts": header.n_experts,
        "n_used": header.n_used,
        "span_bytes": list(header.span_bytes),
        "n_tokens": trace.n_tokens,
        "n_prompt_tokens": int(trace.is_prompt.sum()),
        "n_sequences": len(trace.starts),
        "main_policy": sweep.main,
        "bend_of_curve": bend_of_curve(sweep),
        "twice_active": 2 * header.n_used,
        "slots": [_rung_values(sweep, rung) for rung in sweep.rungs],
        "guesses_right": {meaning: dict(shares) for meaning, shares in right.items()},
        "locality": _locality_values(local),
    }


def _rung_values(sweep: Sweep, rung: Rung) -> dict[str, Any]:
    trace = sweep.trace
    return {
        "slots": rung.slots,
        "coverage": rung.slots / trace.header.n_experts,
        "layer": {
            "belady": _hit_values(rung.own_best, trace),
            **{policy: _result_values(item, rung.own_best) for policy, item in rung.own.items()},
        },
        "global": {
            "belady": _hit_values(rung.shared_best, trace),
            sweep.main: _result_values(rung.shared, rung.shared_best),
        },
        "guessing": guess_values(rung),
    }


def _result_values(result: SimulationResult, best: Counts) -> dict[str, Any]:
    split: Misses = misses(result, best)
    return {
        **_hit_values(result.layer_hits, result.trace),
        "decode_hit_rate": result.decode_rate,
        "misses": split._asdict(),
        "read_bytes_per_token": result.read_bytes,
        "copied_bytes_per_token": result.copied_bytes,
    }


def _hit_values(hits: Counts, trace: Trace) -> dict[str, Any]:
    rates = hits / (trace.n_tokens * trace.header.n_used)
    return {
        "hit_rate": float(rates.mean()),
        "worst_layer_hit_rate": float(rates.min()),
        "hits_per_layer": hits.tolist(),
    }


def _locality_values(local: Locality) -> dict[str, Any]:
    return {
        "overlap": _plain(local.overlap),
        "overlap_by_chance": local.overlap_by_chance,
        "covering": {str(share): _plain(values) for share, values in local.covering.items()},
        "reuse_distance": _plain(local.reuse_distance),
        "working_set": {str(window): _plain(size) for window, size in local.working_set.items()},
        "consistency": _plain(local.consistency),
        "consistency_size": _plain(local.consistency_size),
    }


def _plain(values: Iterable[float]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
