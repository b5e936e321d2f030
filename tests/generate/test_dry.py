"""DRY against a plain one that compares every two places of a text, as llama.cpp defines it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.generate.conftest import spm_metadata, tokenizer_of
from vkmoe.config import SamplingConfig
from vkmoe.errors import UsageError
from vkmoe.generate.dry import Dry
from vkmoe.generate.sampler import Sampler
from vkmoe.generate.text.tokenizer import Tokenizer

BREAKERS = ("\n", "hell", "xyz", "é:")


def sequences(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> list[tuple[int, ...]]:
    """llama.cpp's get_overlapping_token_sequences: a token, and what must follow it."""
    found: list[tuple[int, ...]] = []
    for text in (breaker.encode() for breaker in breakers):
        for token in range(tokenizer.n_vocab):
            word = tokenizer.token_bytes(token, after_special=False)
            if text in word:
                found.append((token,))
                continue
            for start in range(len(word)):
                n = len(word) - start
                if n < len(text) and word[start:] == text[:n]:
                    rest = text[n:].decode("utf-8", "ignore")
                    if rest.encode() == text[n:]:
                        found.append((token, *tokenizer.encode_plain(rest)))
    return found


def plain(
    history: list[int], config: SamplingConfig, breakers: list[tuple[int, ...]]
) -> list[float]:
    """What is subtracted from the logit of each of 300 tokens."""
    n_last = config.dry_penalty_last_n
    text = history if n_last < 0 else history[max(0, len(history) - n_last) :]
    limit = len(text)
    for start in range(len(text) - 1, -1, -1):
        held = [len(each) for each in breakers if text[start : start + len(each)] == list(each)]
        if held:
            limit = len(text) - start - max(held)
            break
    penalties = [0.0] * 300
    for place in range(len(text) - 1):
        n = 0
        while n <= place and text[place - n] == text[len(text) - 1 - n]:
            n += 1
        n, token = min(n, limit), text[place + 1]
        if n >= config.dry_allowed_length and (token,) not in breakers:
            exponent = n - config.dry_allowed_length
            if config.dry_base > 1.000001:
                exponent = min(exponent, int(88.7228391 / np.log(config.dry_base)))
            penalty = config.dry_multiplier * config.dry_base**exponent
            penalties[token] = max(penalties[token], penalty)
    return penalties


@pytest.mark.parametrize("seed", range(25))
def test_repeats_cost_what_a_plain_comparison_says(tiny_tokenizer: Tokenizer, seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = SamplingConfig(
        dry_multiplier=float(rng.choice([0.5, 2.0])),
        dry_base=float(rng.choice([1.0, 1.75, 90.0])),
        dry_allowed_length=int(rng.integers(1, 5)),
        dry_penalty_last_n=int(rng.choice([-1, 1, 7, 40])),
        dry_sequence_breakers=json.dumps(BREAKERS[: rng.integers(0, 5)]),
    )
    dry = Dry(config, tiny_tokenizer)
    breakers = sequences(tiny_tokenizer, BREAKERS[: len(json.loads(config.dry_sequence_breakers))])
    letters = tiny_tokenizer.encode_plain("ab\nhelxyzé:")
    few = rng.choice(letters, int(rng.integers(1, 5))).tolist()
    phrase = rng.choice(letters, 6).tolist()
    history: list[int] = []
    for _ in range(60):
        history += phrase if rng.random() < 0.3 else [int(rng.choice(few))]
        found = dry.penalties(history)
        expected = plain(history, config, breakers)
        assert [found.get(token, 0.0) for token in range(300)] == pytest.approx(expected)


def test_a_breaker_may_begin_and_end_amid_tokens() -> None:
    """It is "b c" in the tokens "ab" and " c": where they stand, a repeat begins anew."""
    tokenizer = tokenizer_of(spm_metadata(["ab", "▁", "c", "d", "b", "a", "▁c"]))
    ids = {word: tokenizer.words.index(word.encode()) for word in ("ab", " c", "d", "a")}
    text = [ids[word] for word in ("d", "ab", " c", "a", "d", "d", "ab", " c", "a")]
    free, broken = (
        Dry(SamplingConfig(dry_multiplier=1.0, dry_sequence_breakers=each), tokenizer)
        for each in ('["x"]', '["b c"]')
    )
    assert free.penalties(text) == {ids["d"]: 1.75**2}
    assert broken.penalties(text) == {}, "one token is behind it"
    assert broken.penalties(text[1:3] * 2) == {}
    assert free.penalties(text[1:3] * 2) == {ids["ab"]: 1.0}


def test_a_repeat_ends_where_it_costs_too_much(tiny_tokenizer: Tokenizer) -> None:
    logits = np.zeros(300, np.float32)
    logits[7], logits[9] = 3.0, 2.0
    config = SamplingConfig(temp=0, dry_multiplier=0.8, dry_sequence_breakers="[]")
    sampler = Sampler(config, 1, dry=Dry(config, tiny_tokenizer))
    sampler.accept([1, 2, 3, 7, 5, 2, 3])
    assert sampler.sample(None, lambda: logits) == 7, "two tokens cost 0.8"
    sampler.accept([7, 5, 2, 3])
    assert sampler.sample(None, lambda: logits) == 9


@pytest.mark.parametrize("text", ["x", "{}", "[1]", '[""]', json.dumps(["y" * 41])])
def test_breakers_are_a_json_list_of_short_texts(text: str) -> None:
    with pytest.raises(UsageError, match="--dry-sequence-breakers"):
        SamplingConfig(dry_sequence_breakers=text)
