"""Measure how well a model predicts a text."""

from vkmoe import LLM
from vkmoe.generate.perplexity import Windows

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 4

with LLM(ctx_size=256) as llm:
    for estimate in llm.perplexity(TEXT, Windows(length=32)):
        print(f"after {estimate.n_tokens} tokens: {estimate.perplexity:.2f}")
