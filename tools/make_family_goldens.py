"""Ask the families' own tokenizers for the tokens of difficult strings, for the tokenizer's tests.

    pip install transformers tokenizers
    python -m tools.make_family_goldens

Writes tests/generate/text/tokens/own-NAME.json.xz: a small vocabulary that is trained on the
strings, cut as the family cuts them, and what its own tokenizer makes of all of them. Gemma's is
that of transformers. The others have the family's published pattern in the `tokenizers` package;
what composes characters before it (NFC) is left out, as in vkmoe.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tools.make_tokenizer_goldens import store
from tools.tokenizer_strings import difficult_strings

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(upper: str, lower: str) -> str:
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}%s{lower}%s(?i:{_ENDINGS})?"
    return f"{word % ('*', '+')}|{word % ('+', '*')}" + r"|\p{N}{1,3}"


# What each family cuts by, one pattern after the other.
PATTERNS = {
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (
        r"[\p{Han}]+|"
        + _cased(rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]")
        + rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    ),
    "tiny_aya": (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        _cased(f"[{_UPPER}]", f"[{_LOWER}]") + rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
    ),
}
_N_TOKENS = 1500


def strings() -> list[str]:
    """Difficult strings that are text."""
    decoded = [(raw, raw.decode(errors="replace")) for raw in difficult_strings()]
    return [text for raw, text in decoded if text.encode() == raw]


def _trained(tokenizer: Tokenizer, alphabet: list[str], n_characters: int) -> Any:
    """Train a tokenizer on the strings; its model, as `tokenizers` writes it."""
    trainer = trainers.BpeTrainer(
        vocab_size=_N_TOKENS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=n_characters,
    )
    tokenizer.train_from_iterator([text.replace("<0x", "") for text in strings()], trainer)
    return json.loads(tokenizer.to_str())["model"]


def pattern_golden(name: str) -> dict[str, Any]:
    """A byte-level vocabulary of a family, and the ids of the strings."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[name]
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    model = _trained(tokenizer, sorted(pre_tokenizers.ByteLevel.alphabet()), 256)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "ids": [tokenizer.encode(text).ids for text in strings()],
    }


def gemma_golden() -> dict[str, Any]:
    """A vocabulary like Gemma's, in which no token has line ends and others, and the ids."""
    from transformers import GemmaTokenizer  # type: ignore[import-not-found,unused-ignore]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    model = _trained(tokenizer, [], 300)  # some characters are left to bytes
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [tuple(pair) for pair in model["merges"]]
    ids = {text: i for i, text in enumerate(tokens)}
    own = GemmaTokenizer(vocab=ids, merges=merges)
    return {
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in merges],
        "ids": [own.encode(text, add_special_tokens=False) for text in strings()],
    }


def main() -> None:
    """Store every golden."""
    store("own-gemma4", gemma_golden())
    for name in PATTERNS:
        store(f"own-{name}", pattern_golden(name))


if __name__ == "__main__":
    main()
