"""Mirostat against a plain one, written as llama.cpp's: 32-bit floats aside."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vkmoe.config import SamplingConfig
from vkmoe.generate.sampler import Sampler

N_VOCAB = 400


class Plain:
    """Draws as llama_sampler_mirostat_apply and llama_sampler_mirostat_v2_apply do."""

    def __init__(self, config: SamplingConfig, seed: int) -> None:
        self.config, self.mu = config, 2 * config.mirostat_tau
        self.random = np.random.default_rng(seed)

    def sample(self, logits: list[float]) -> int:
        ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
        heat = [
            math.exp((logits[token] - logits[ranked[0]]) / self.config.temp) for token in ranked
        ]
        p = [each / math.fsum(heat) for each in heat]
        p = p[: self.first(p) if self.config.mirostat == 1 else self.second(p)]
        p = [each / math.fsum(p) for each in p]
        chance, reached, place = self.random.random(), 0.0, 0
        for place, each in enumerate(p):  # noqa: B007
            reached += each
            if reached > chance:
                break
        surprise = -math.log2(p[place])
        self.mu -= self.config.mirostat_eta * (surprise - self.config.mirostat_tau)
        return ranked[place]

    def first(self, p: list[float]) -> int:
        products, squares = 0.0, 0.0
        for i in range(min(99, len(p) - 1)):
            t, b = math.log((i + 2) / (i + 1)), math.log(p[i] / p[i + 1])
            products, squares = products + t * b, squares + t * t
        s = products / squares
        k = (((s - 1) * 2**self.mu) / (1 - N_VOCAB ** -(s - 1))) ** (1 / s)
        return max(1, min(int(k), len(p)))

    def second(self, p: list[float]) -> int:
        n = 0
        while n < len(p) and -math.log2(p[n]) <= self.mu:
            n += 1
        return max(1, n)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(5.0, 0.1), (2.0, 0.5), (0.5, 1.0), (9.0, 0.05)])
@pytest.mark.sample(3)
def test_tokens_are_those_of_a_plain_mirostat(version: int, tau: float, eta: float) -> None:
    config = SamplingConfig(
        temp=0.9, mirostat=version, mirostat_tau=tau, mirostat_eta=eta, repeat_penalty=50.0
    )  # fmt: skip
    sampler, plain = Sampler(config, seed=3), Plain(config, seed=3)
    rng = np.random.default_rng(version)
    chosen = []
    for _ in range(150):
        logits = rng.normal(0, rng.choice([1.0, 3.0]), N_VOCAB).astype(np.float32)
        chosen.append(sampler.sample(None, lambda logits=logits: logits))  # type: ignore[misc]
        assert chosen[-1] == plain.sample(logits.tolist())
        sampler.accept(chosen[-1:])
    assert len(set(chosen)) > 30


@pytest.mark.parametrize("version", [1, 2])
def test_its_surprise_nears_the_target(version: int) -> None:
    """Of a vocabulary whose probabilities fall as in a text, tokens have 3 bits on average."""
    logits = -1.1 * np.log(np.arange(1, 5001)).astype(np.float32)
    p = np.exp(logits) / np.exp(logits).sum()
    sampler = Sampler(SamplingConfig(temp=1.0, mirostat=version, mirostat_tau=3.0), seed=5)
    bits = [-math.log2(p[sampler.sample(None, lambda: logits)]) for _ in range(3000)]
    free = Sampler(SamplingConfig(temp=1.0, top_k=0, top_p=1.0, min_p=0.0), seed=5)
    all_bits = [-math.log2(p[free.sample(None, lambda: logits)]) for _ in range(3000)]
    assert np.mean(bits[200:]) < np.mean(all_bits) - 2


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "logits", [[1.0], [0.0] * 50, [5.0] + [-np.inf] * 9, [80.0, *[-1e4] * 20], [3.0, 3.0]]
)
@pytest.mark.parametrize(
    "options", [{}, {"temp": 0.0}, {"mirostat_tau": 100.0}, {"mirostat_tau": 0}]
)
def test_odd_distributions_have_a_token(
    version: int, logits: list[float], options: dict[str, Any]
) -> None:
    config = SamplingConfig(**{"mirostat": version, "mirostat_eta": 1.0, **options})
    sampler, given = Sampler(config, seed=1), np.array(logits, np.float32)
    for _ in range(100):
        assert given[sampler.sample(None, lambda: given)] > -1e3


def test_a_form_and_biases_hold_beside_mirostat() -> None:
    sampler = Sampler(SamplingConfig(mirostat=2), seed=1, banned=[3], biases={5: -100.0})
    allowed = np.zeros(10, np.bool_)
    allowed[[3, 5, 6]] = True
    logits = np.zeros(12, np.float32)
    assert {sampler.sample(None, lambda: logits, allowed) for _ in range(50)} == {6}
