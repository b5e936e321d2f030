"""Routing to replay: that of the demo model on six texts, recorded as `vkmoe trace` does, and
invented routing whose experts are liked very unequally.

Owns the prompts (bench/prompts/) and how routing is recorded and invented. Simulates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vkmoe.batch import RunResult, TokenBatch
from vkmoe.experts.records.trace import Trace, TraceHeader, TraceWriter, read_trace
from vkmoe.llm import LLM
from vkmoe.weights.sizes import trace_header

__all__ = [
    "OTHERS",
    "PROMPTS",
    "drifting_trace",
    "prompt_text",
    "record_trace",
    "skewed_trace",
]

PROMPTS = ("code", "prose", "structured")
OTHERS = ("letter", "orders", "german")  # another prose, other JSON, another language
_FOLDER = Path(__file__).resolve().parent / "prompts"
SEED = 1  # of the replies
N_IDS, TOPIC = 1500, 300.0  # ids of invented tokens; the half-life of a topic, in tokens
PASSING_EVERY = 4  # tokens; then a whole token goes to experts nobody likes


def prompt_text(name: str) -> str:
    """A prompt; over 700 tokens for the demo model."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def record_trace(llm: LLM, tokens: Sequence[int], n_reply: int, path: Path) -> Trace:
    """Run a prompt and a reply of `n_reply` tokens; the routing, by way of a trace file at `path`.

    The last token of the reply is drawn but not run, so it is not in the trace. Tokens are named,
    the same in all traces.
    """
    n_prompt = len(tokens)
    llm.logits(tokens[-1:])  # or the beginning that the prompts share would not be run again
    header = trace_header(llm.spec, llm.engine.model.tensors)
    with TraceWriter(path, header, b"bench") as writer:

        def note(batch: TokenBatch, result: RunResult) -> None:
            rows = zip(batch.positions, result.routing, batch.tokens, strict=True)
            for position, routing, token in rows:
                writer.write(routing, position < n_prompt, token)

        llm.scheduler.after_run = note
        try:
            llm.generate(tokens, max_tokens=n_reply, ignore_eos=True, seed=SEED)
        finally:
            llm.scheduler.after_run = None
    trace = read_trace(path)
    assert trace.n_tokens == n_prompt + n_reply - 1, trace.n_tokens
    return trace


def skewed_trace(n_tokens: int, n_layers: int, n_experts: int, n_used: int, seed: int = 0) -> Trace:
    """Routing by Zipf's law, each layer with an order of its own, and tokens that pass through.

    Every fourth token uses experts of the less liked half, any of them alike: they fill a cache
    that looks at recency alone, and do not come back soon.
    """
    random = np.random.default_rng(seed)
    order = np.argsort(random.random((n_layers, n_experts)), axis=1)
    liking = -np.log1p(np.arange(n_experts))  # log of 1 / rank
    passing = np.where(np.arange(n_experts) < n_experts // 2, -np.inf, 0.0)
    routing = np.empty((n_tokens, n_layers, n_used), np.uint32)
    for token in range(n_tokens):
        scores = passing if token % PASSING_EVERY == PASSING_EVERY - 1 else liking
        # The largest of score + Gumbel noise: draws without replacement (Kool et al. 2019).
        ranks = np.argsort(-(scores + random.gumbel(size=order.shape)), axis=1)[:, :n_used]
        routing[token] = np.take_along_axis(order, ranks, axis=1)
    header = TraceHeader(
        "skewed", "invented", tuple(range(n_layers)), n_experts, n_used, (1 << 20,) * n_layers
    )
    return Trace(header, routing, np.zeros(n_tokens, np.bool_))


def drifting_trace(
    n_tokens: int, n_layers: int, n_experts: int, n_used: int, seed: int = 0
) -> Trace:
    """Routing that follows the token's id, most in the first layers, a topic that drifts, and luck.

    Ids are drawn by Zipf's law. About two fifths of a token's experts are those of the one before
    it, as in real models.
    """
    random = np.random.default_rng(seed)
    shape, often = (n_layers, n_experts), 1 / np.arange(1, N_IDS + 1)
    liking = random.normal(size=(N_IDS, *shape)).astype(np.float32)
    liking *= np.linspace(1.6, 0.9, n_layers, dtype=np.float32)[:, None]
    ids = random.choice(random.permutation(N_IDS), n_tokens, p=often / often.sum())
    usual, topic, late = 0.7 * random.gumbel(size=shape), random.normal(size=shape), np.zeros(shape)
    stays = 0.5 ** (1 / TOPIC)
    routing = np.empty((n_tokens, n_layers, n_used), np.uint32)
    for token, name in enumerate(ids):
        topic = stays * topic + np.sqrt(1 - stays**2) * random.normal(size=shape)
        late = 0.8 * late + 0.6 * random.normal(size=shape)
        scores = usual + 1.2 * topic + 0.8 * late + liking[name] + 0.5 * random.gumbel(size=shape)
        routing[token] = np.argsort(-scores, axis=1)[:, :n_used]
    header = TraceHeader(
        "drifting", "invented", tuple(range(n_layers)), n_experts, n_used, (1 << 20,) * n_layers
    )
    return Trace(header, routing, np.zeros(n_tokens, np.bool_), ids=ids.astype(np.int64))
