"""Traces made up for tests: random ones, and ones whose experts change slowly as real ones do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.records.trace import Trace, TraceHeader


def header(n_layers: int, n_experts: int, n_used: int, **changes: object) -> TraceHeader:
    """A header whose layers have spans of 1000 and 1001 bytes in turn."""
    values: dict[str, object] = {
        "model": "invented",
        "architecture": "qwen3moe",
        "layer_numbers": tuple(range(1, n_layers + 1)),
        "n_experts": n_experts,
        "n_used": n_used,
        "span_bytes": tuple(1000 + layer % 2 for layer in range(n_layers)),
        **changes,
    }
    return TraceHeader(**values)  # type: ignore[arg-type]


def trace_of(
    routing: NDArray[np.uint32], n_experts: int, n_prompt: int = 0, starts: Sequence[int] = (0,)
) -> Trace:
    """A trace of `routing` [n_tokens, n_layers, n_used]."""
    n_tokens, n_layers, n_used = routing.shape
    return Trace(
        header(n_layers, n_experts, n_used),
        routing,
        np.arange(n_tokens) < n_prompt,
        tuple(starts),
    )


def of_ids(*tokens: Sequence[int], n_experts: int = 8) -> Trace:
    """One layer, its experts token by token."""
    return trace_of(np.array(tokens, np.uint32)[:, None, :], n_experts)


def drifting(
    n_tokens: int, n_layers: int, n_experts: int, n_used: int, seed: int = 0, persistence: float = 1
) -> NDArray[np.uint32]:
    """Routing [n_tokens, n_layers, n_used]: some experts are liked more, and likings drift."""
    random = np.random.default_rng(seed)
    shape = (n_layers, n_experts)
    liking, drift = random.gumbel(size=shape), np.zeros(shape)
    tokens = []
    for _ in range(n_tokens):
        drift = 0.9 * drift + 0.45 * random.normal(size=shape)
        score = liking + 2 * persistence * drift + random.gumbel(size=shape)
        tokens.append(np.argsort(-score, axis=1)[:, :n_used])
    return np.array(tokens, np.uint32)
