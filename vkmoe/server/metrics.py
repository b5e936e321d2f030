"""Counts what a server does, and writes it in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.generate.loop import GenerationStatistics
from vkmoe.llm import LLM
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.view.experts import bytes_by_way

_FIRST_TOKEN_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics:
    """Holds the counts of one server."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = registry = CollectorRegistry()
        self._as_llama = _LlamaCounts(engine)
        registry.register(_EngineCounts(engine))
        running = Gauge("vkmoe_requests_running", "Replies under way.", registry=registry)
        running.set_function(lambda: engine.n_running)
        waiting = Gauge("vkmoe_requests_waiting", "Replies that wait.", registry=registry)
        waiting.set_function(lambda: engine.n_waiting)
        self._requests = Counter("vkmoe_requests", "Replies that began.", registry=registry)
        self._prompt = Counter("vkmoe_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter(
            "vkmoe_cached_tokens",
            "Tokens of prompts that were not computed again.",
            registry=registry,
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

    def ended(self, found: GenerationStatistics, n_read: int) -> None:
        """Count the tokens of a reply that ended; `n_read` of its prompt were read."""
        self._prompt.inc(n_read)
        self._cached.inc(found.n_reused_tokens)
        self._reply.inc(found.n_generated_tokens)
        self._as_llama.ended(found, n_read)

    def text(self) -> bytes:
        """Write all counts."""
        return generate_latest(self._registry) + self._as_llama.text().encode()


class _EngineCounts(Collector):
    """Reads what the engine counts of experts, if there are any, and of prompts that it keeps.

    They begin anew with a model that is loaded again. Of one that sleeps they are the last ones.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine, self._last = engine, list[Metric]()

    def collect(self) -> Iterator[Metric]:
        """Yield what was counted since the model was loaded, and the bytes that are kept now."""
        with suppress(VkmoeError):
            llm = self._engine.llm
            self._last = [*self._of_experts(llm.engine), *self._of_kept_prompts(llm)]
        yield from self._last

    def _of_kept_prompts(self, llm: LLM) -> Iterator[Metric]:
        restored = "Tokens of prompts that came back from host memory."
        n_restored = llm.scheduler.regions.kept.n_restored
        yield CounterMetricFamily("vkmoe_restored_tokens", restored, n_restored)
        kept = "Host memory of prompts that left the KV cache."
        yield GaugeMetricFamily("vkmoe_kept_prompt_bytes", kept, llm.engine.texts.n_bytes)

    def _of_experts(self, engine: Engine) -> Iterator[Metric]:
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

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: there is no model yet when this is registered."""
        return iter(())


class _LlamaCounts:
    """Counts under llama-server's names, for dashboards that know these.

    Rates are those since they were last read.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._n_prompt = self._n_cached = self._n_reply = self._n_most = 0
        self._n_drafts = self._n_drafted = self._n_accepted = 0
        self._prompt_seconds = self._reply_seconds = 0.0
        self._read = (0, 0.0, 0, 0.0)  # tokens and seconds of prompts and of replies

    def ended(self, found: GenerationStatistics, n_read: int) -> None:
        """Count a reply that ended. Mutates."""
        self._n_prompt += n_read - found.n_reused_tokens
        self._n_cached += found.n_reused_tokens
        self._n_reply += found.n_generated_tokens
        self._n_most = max(self._n_most, n_read + found.n_generated_tokens)
        self._n_drafts += found.n_decode_steps if found.n_drafted_tokens else 0
        self._n_drafted += found.n_drafted_tokens
        self._n_accepted += found.n_accepted_tokens
        self._prompt_seconds += found.prompt_seconds
        self._reply_seconds += found.decode_seconds

    def text(self) -> str:
        """Write all counts, in the form that Prometheus reads. Mutates: rates begin anew."""
        before = self._read
        self._read = (self._n_prompt, self._prompt_seconds, self._n_reply, self._reply_seconds)
        since = [now - then for now, then in zip(self._read, before, strict=True)]
        n_runs, n_turns = self._engine.n_runs
        values = (
            ("prompt_tokens_total", "Prompt tokens that were computed.", self._n_prompt),
            ("prompt_tokens_cached_total", "Prompt tokens found in the cache.", self._n_cached),
            ("prompt_seconds_total", "Seconds that prompts took.", self._prompt_seconds),
            ("tokens_predicted_total", "Tokens of replies.", self._n_reply),
            ("tokens_predicted_seconds_total", "Seconds that replies took.", self._reply_seconds),
            ("n_decode_total", "Runs of the model.", n_runs),
            ("n_tokens_max", "Most tokens of a prompt and its reply.", self._n_most),
            ("spec_decode_num_draft_tokens_total", "Tokens that were guessed.", self._n_drafted),
            ("spec_decode_num_accepted_tokens_total", "Right guesses.", self._n_accepted),
            ("spec_decode_num_drafts_total", "Runs of replies with guesses.", self._n_drafts),
            ("prompt_tokens_seconds", "Prompt tokens per second.", _rate(*since[:2])),
            ("predicted_tokens_seconds", "Reply tokens per second.", _rate(*since[2:])),
            ("requests_processing", "Replies under way.", self._engine.n_running),
            ("requests_deferred", "Replies that wait.", self._engine.n_waiting),
            ("n_busy_slots_per_decode", "Replies in a run of the model.", _rate(n_turns, n_runs)),
        )
        lines = []
        for index, (name, help_text, value) in enumerate(values):
            name, kind = f"llamacpp:{name}", "counter" if index < _N_COUNTERS else "gauge"
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


_N_COUNTERS = 10  # of the values above


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds else 0.0
