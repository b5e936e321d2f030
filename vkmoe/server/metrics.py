"""Counts what a server does, and writes it in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from vkmoe.server.engine_thread import EngineThread
from vkmoe.server.errors import ApiError
from vkmoe.view.experts import bytes_by_way

_FIRST_TOKEN_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics:
    """Holds the counts of one server."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_ExpertCounts(engine))
        running = Gauge("vkmoe_requests_running", "Replies under way.", registry=registry)
        running.set_function(lambda: engine.n_running)
        waiting = Gauge("vkmoe_requests_waiting", "Replies that wait.", registry=registry)
        waiting.set_function(lambda: engine.n_waiting)
        self._requests = Counter("vkmoe_requests", "Replies that began.", registry=registry)
        self._prompt = Counter("vkmoe_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter(
            "vkmoe_cached_tokens", "Tokens of prompts that were in the KV cache.", registry=registry
        )
        self._reply = Counter("vkmoe_reply_tokens", "Tokens of replies.", registry=registry)
        self._first = Histogram(
            "vkmoe_time_to_first_token_seconds",
            "From the request to the first token of its reply.",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._between = Histogram(
            "vkmoe_inter_token_seconds",
            "Between two tokens of a reply.",
            buckets=_TOKEN_S,
            registry=registry,
        )

    def begun(self, n_replies: int) -> None:
        """Count replies that begin."""
        self._requests.inc(n_replies)

    def first_token(self, seconds: float) -> None:
        """Note how long a reply's first token took."""
        self._first.observe(seconds)

    def next_tokens(self, n_tokens: int, seconds: float) -> None:
        """Note how long more tokens of a reply took."""
        for _ in range(n_tokens):
            self._between.observe(seconds / n_tokens)

    def ended(self, n_prompt: int, n_cached: int, n_reply: int) -> None:
        """Count the tokens of a reply that ended."""
        self._prompt.inc(n_prompt)
        self._cached.inc(n_cached)
        self._reply.inc(n_reply)

    def text(self) -> bytes:
        """Write all counts."""
        return generate_latest(self._registry)


class _ExpertCounts(Collector):
    """Reads what the engine counts of experts; where there are none, there are no counts.

    They begin anew with a model that is loaded again.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield hits, misses and bytes since the model was loaded."""
        with suppress(ApiError):
            engine = self._engine.llm.engine
            if engine.profiler is None:
                return
            tally, n_bytes = engine.experts.tally, bytes_by_way(engine)
            hits = "Uses of experts that were in device memory."
            yield CounterMetricFamily("vkmoe_expert_hits", hits, tally.n_hits)
            misses = "Uses of experts that were not."
            yield CounterMetricFamily("vkmoe_expert_misses", misses, tally.n_uses - tally.n_hits)
            ways = CounterMetricFamily(
                "vkmoe_expert_bytes", "Bytes of experts, by how they were served.", labels=["way"]
            )
            for way, n in n_bytes.items():
                ways.add_metric([way], n)
            yield ways

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield nothing: there is no model yet when this is registered."""
        return iter(())
