"""The sampler against a plain one that always sorts the whole vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.generate.sampler import Sampler, random_seed

Logits = npt.NDArray[np.float32]
OFF = SamplingConfig(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


def best(logits: Logits, n: int) -> TopLogits:
    order = np.lexsort((np.arange(logits.size), -logits))[:n]
    wide = logits.astype(np.float64)
    total = float(np.float32(wide.max() + np.log(np.exp(wide - wide.max()).sum())))
    return TopLogits(order.astype(np.int32), logits[order], logits.size, total)


def never() -> Logits:
    raise AssertionError("the full logits were fetched")


def plain_choice(
    logits: Logits,
    config: SamplingConfig,
    history: list[int],
    draws: np.random.Generator,
    banned: set[int],
    biases: dict[int, float],
) -> int:
    """The documented order of steps, written without any shortcut."""
    values = {i: float(logit) for i, logit in enumerate(logits)}
    n_last = config.repeat_last_n
    window = history if n_last < 0 else history[len(history) - n_last :] if n_last else []
    window = history if n_last > len(history) else window
    for token, count in Counter(window).items():
        value = values[token]
        value = value / config.repeat_penalty if value > 0 else value * config.repeat_penalty
        values[token] = value - config.presence_penalty - count * config.frequency_penalty
    for token, bias in biases.items():
        values[token] += bias
    for token in banned:
        values[token] = -np.inf
    possible = [token for token, value in values.items() if value > -np.inf]
    ranked = sorted(possible, key=lambda token: (-values[token], token))
    ranked = ranked[: config.top_k or None]
    if config.typical_p < 1:
        ranked = typical(ranked, values, config.typical_p)
    top = values[ranked[0]]
    weights = [float(np.exp(values[token] - top)) for token in ranked]
    reached, kept = 0.0, len(ranked)
    if config.top_p < 1:
        for i, weight in enumerate(weights):
            reached += weight
            if reached >= config.top_p * sum(weights):
                kept = i + 1
                break
    if config.min_p > 0:
        limit = top + math.log(config.min_p)
        kept = min(kept, sum(values[token] >= limit for token in ranked))
    ranked = ranked[:kept]
    if config.xtc_probability > 0 and config.xtc_threshold <= 0.5 and len(ranked) > 1:
        ranked = without_top(ranked, values, config, draws.random())
    if config.temp == 0:
        return ranked[0]
    top = values[ranked[0]]
    heat = [float(np.exp((values[token] - top) / config.temp)) for token in ranked]
    target, reached = draws.random() * sum(heat), 0.0
    for token, weight in zip(ranked, heat, strict=True):
        reached += weight
        if reached > target:
            return token
    return ranked[-1]


def shares(ranked: list[int], values: dict[int, float]) -> list[float]:
    weights = [math.exp(values[token] - values[ranked[0]]) for token in ranked]
    return [weight / math.fsum(weights) for weight in weights]


def typical(ranked: list[int], values: dict[int, float], share: float) -> list[int]:
    """llama.cpp's llama_sampler_typical: nearest to the entropy first, until `share` is passed."""
    found = {token: p for token, p in zip(ranked, shares(ranked, values), strict=True) if p > 0}
    entropy = math.fsum(-p * math.log(p) for p in found.values())
    kept, reached = set(), 0.0
    for token in sorted(found, key=lambda token: abs(-math.log(found[token]) - entropy)):
        kept.add(token)
        reached += found[token]
        if reached > share:
            break
    return [token for token in ranked if token in kept]


def without_top(
    ranked: list[int], values: dict[int, float], config: SamplingConfig, chance: float
) -> list[int]:
    """llama.cpp's llama_sampler_xtc: all but the last of those that reach the threshold go."""
    if chance > config.xtc_probability:
        return ranked
    last = 0
    for place, p in enumerate(shares(ranked, values)):
        if p < config.xtc_threshold:
            break
        last = place
    return ranked[last:]


def random_config(rng: np.random.Generator) -> SamplingConfig:
    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return SamplingConfig(
        temp=pick(0.0, 0.3, 0.8, 1.0, 3.0),
        top_k=pick(0, 1, 5, 16, 40, 64, 100, 1000),
        top_p=pick(0.0, 0.1, 0.5, 0.9, 0.95, 1.0),
        min_p=pick(0.0, 0.0, 0.01, 0.05, 0.5, 1.0),
        typical_p=pick(1.0, 1.0, 1.0, 0.0, 0.3, 0.9),
        xtc_probability=pick(0.0, 0.0, 0.0, 0.5, 1.0),
        xtc_threshold=pick(0.05, 0.1, 0.3, 0.6),
        repeat_penalty=pick(1.0, 1.0, 1.1, 2.0, 0.8),
        repeat_last_n=pick(0, 3, 64, -1),
        presence_penalty=pick(0.0, 0.0, 0.5, -0.5),
        frequency_penalty=pick(0.0, 0.0, 0.2, -0.2),
    )


def random_logits(rng: np.random.Generator, n_vocab: int) -> Logits:
    logits = rng.normal(0, rng.choice([0.1, 1.0, 4.0]), n_vocab).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)  # many ties
    if rng.random() < 0.1:
        logits[rng.random(n_vocab) < 0.9] = -np.inf
        logits[0] = 1.0
    return logits


def random_mask(
    rng: np.random.Generator, logits: Logits, banned: set[int]
) -> tuple[npt.NDArray[np.bool_] | None, set[int]]:
    """What a form may allow of a vocabulary that may be shorter, and all that cannot be chosen."""
    finite = [i for i in np.flatnonzero(np.isfinite(logits)).tolist() if i not in banned]
    if rng.random() < 0.5:
        return None, banned
    allowed = rng.random(logits.size) < rng.choice([0.001, 0.1, 0.9])
    some = int(rng.choice(finite))
    allowed[some] = True
    allowed = allowed[: max(some + 1, logits.size - int(rng.integers(0, 3)))]
    forbidden = np.flatnonzero(~allowed).tolist()
    return allowed, {*banned, *forbidden, *range(allowed.size, logits.size)}


@pytest.mark.parametrize("seed", range(400))
def test_candidates_choose_what_full_logits_choose(seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = random_config(rng)
    n_vocab = int(rng.choice([1, 5, 63, 64, 65, 200, 1500]))
    banned = set(rng.integers(0, n_vocab, 2).tolist()) if rng.random() < 0.2 else set()
    if len(banned) >= n_vocab:
        banned = set()
    biases: dict[int, float] = {}
    if rng.random() < 0.2:
        biases = {int(i): float(rng.normal(0, 5)) for i in rng.integers(0, n_vocab, 5)}
    few, full = (Sampler(config, seed, banned, biases) for _ in range(2))
    draws = np.random.default_rng(seed)
    history: list[int] = []
    for _ in range(6):
        logits = random_logits(rng, n_vocab)
        if 0 in banned:
            logits[1 if n_vocab > 1 and 1 not in banned else -1] = 2.0
        if all(not np.isfinite(logits[i]) for i in range(n_vocab) if i not in banned):
            continue
        candidates = best(logits, 64)
        allowed, excluded = random_mask(rng, logits, banned)
        chosen = few.sample(candidates, lambda logits=logits: logits, allowed)  # type: ignore[misc]
        assert chosen == full.sample(None, lambda logits=logits: logits, allowed)  # type: ignore[misc]
        assert chosen == plain_choice(logits, config, history, draws, excluded, biases)
        likely = [chosen, *best(logits, 3).ids.tolist()]
        few.accept(likely)
        full.accept(likely)
        history += likely


def test_the_defaults_never_need_the_full_logits() -> None:
    rng = np.random.default_rng(1)
    sampler = Sampler(SamplingConfig(), seed=1)
    for _ in range(50):
        logits = rng.normal(0, 3, 5000).astype(np.float32)
        sampler.accept([sampler.sample(best(logits, 64), never)])


@pytest.mark.parametrize(
    ("options", "n_fetches"),
    [
        ({}, 1),
        ({"temp": 0.0}, 0),
        ({"top_k": 64}, 0),
        ({"top_k": 65}, 1),
        ({"min_p": 0.9}, 0),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.999999, "top_k": 64}, 0),
        ({"typical_p": 0.5}, 1),
        ({"typical_p": 0.5, "temp": 0.0}, 1),
        ({"typical_p": 0.5, "top_k": 64}, 0),
        ({"xtc_probability": 1.0, "top_k": 64}, 0),
        ({"repeat_penalty": 1.1, "top_k": 40}, 1),
    ],
)
def test_full_logits_are_fetched_exactly_when_candidates_cannot_decide(
    options: dict[str, Any], n_fetches: int
) -> None:
    logits = np.linspace(8, 0, 4000, dtype=np.float32)
    logits[0] = 16
    sampler = Sampler(replace(OFF, **options), seed=0)
    sampler.accept([5])
    fetched: list[Logits] = []
    sampler.sample(best(logits, 64), lambda: fetched.append(logits) or logits)  # type: ignore
    assert len(fetched) == n_fetches


def test_a_penalty_on_all_candidates_reaches_tokens_that_are_not_listed() -> None:
    logits = np.linspace(1, 0.9, 100, dtype=np.float32)
    config = SamplingConfig(temp=0, repeat_penalty=2.0, repeat_last_n=-1)
    sampler = Sampler(config, seed=0)
    sampler.accept(list(range(64)))
    assert sampler.sample(best(logits, 64), lambda: logits) == 64


def test_a_negative_penalty_may_lift_a_token_that_is_not_listed() -> None:
    logits = np.linspace(1, 0.9, 100, dtype=np.float32)
    sampler = Sampler(SamplingConfig(temp=0, presence_penalty=-1.0), seed=0)
    sampler.accept([99])
    assert sampler.sample(best(logits, 64), lambda: logits) == 99


def test_the_window_of_the_penalties_forgets() -> None:
    logits = np.array([1.0, 0.9, 0.0], dtype=np.float32)
    config = SamplingConfig(temp=0, presence_penalty=0.5, repeat_last_n=2)
    sampler = Sampler(config, seed=0)
    sampler.accept([0])
    assert sampler.sample(None, lambda: logits) == 1
    sampler.accept([2, 2])
    assert sampler.sample(None, lambda: logits) == 0


def test_banned_tokens_are_never_chosen() -> None:
    logits = np.array([5.0, 1.0, 0.0, -1.0], dtype=np.float32)
    sampler = Sampler(replace(OFF, temp=5.0), seed=3, banned=[0, 2])
    chosen = {sampler.sample(best(logits, 4), lambda: logits) for _ in range(200)}
    assert chosen == {1, 3}


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_bias_forces_and_forbids_tokens_that_are_not_listed_too(temp: float) -> None:
    logits = np.linspace(9, -9, 200, dtype=np.float32)
    config = SamplingConfig(temp=temp, repeat_penalty=1.3)
    forced = Sampler(config, seed=1, biases={199: 100.0})
    assert {forced.sample(best(logits, 64), lambda: logits) for _ in range(50)} == {199}
    forbidden = Sampler(config, seed=1, biases=dict.fromkeys(range(198), -100.0))
    assert {forbidden.sample(best(logits, 64), lambda: logits) for _ in range(50)} <= {198, 199}


def test_a_form_of_few_tokens_is_decided_without_the_full_logits() -> None:
    logits = np.linspace(9, -9, 200, dtype=np.float32)
    allowed = np.zeros(200, np.bool_)
    allowed[[3, 63]] = True
    sampler = Sampler(SamplingConfig(), seed=1)
    assert sampler.sample(best(logits, 64), never, allowed) == 3
    allowed[100] = True  # is not listed: it may count
    with pytest.raises(AssertionError, match="fetched"):
        sampler.sample(best(logits, 64), never, allowed)
    assert Sampler(SamplingConfig(temp=0), 1).sample(best(logits, 64), never, allowed) == 3


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    first, again = Sampler(OFF, seed=7), Sampler(OFF, seed=7)
    draws = [first.sample(best(logits, 3), never) for _ in range(4000)]
    assert draws[:500] == [again.sample(best(logits, 3), never) for _ in range(500)]
    shares = np.bincount(draws, minlength=3) / len(draws)
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.03)
    other = Sampler(OFF, seed=8)
    assert draws[:500] != [other.sample(best(logits, 3), never) for _ in range(500)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("listed", [True, False])
def test_logits_that_are_no_numbers_are_an_error(bad: float, listed: bool) -> None:
    logits = np.array([1.0, bad, 0.0], dtype=np.float32)
    candidates = TopLogits(np.arange(3, dtype=np.int32), logits, 3, 0.0) if listed else None
    with pytest.raises(VkmoeError, match="not numbers"):
        Sampler(SamplingConfig(temp=0), seed=0).sample(candidates, lambda: logits)


def test_a_sum_that_is_no_number_is_an_error() -> None:
    logits = np.zeros(100, dtype=np.float32)
    candidates = best(logits, 64)._replace(log_sum_exp=float("nan"))
    with pytest.raises(VkmoeError, match="not numbers"):
        Sampler(SamplingConfig(), seed=0).sample(candidates, lambda: logits)


def test_no_possible_token_is_an_error() -> None:
    logits = np.full(100, -np.inf, dtype=np.float32)
    with pytest.raises(VkmoeError, match="no token can be chosen"):
        Sampler(SamplingConfig(), seed=0).sample(None, lambda: logits)


def test_random_seeds_differ() -> None:
    assert len({random_seed() for _ in range(8)}) > 1
