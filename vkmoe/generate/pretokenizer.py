"""How text is cut into words before byte-pair merging, by the name a GGUF file gives it.

Owns the table of `tokenizer.ggml.pre` names and what each means for the `tokenizers` package.
Does not own merging, special tokens or the vocabulary (see tokenizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vkmoe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["PRE_TOKENIZERS", "PreTokenizerSpec", "pre_tokenizer_spec"]

# Contractions, then a word with at most one leading non-letter, digits, symbols, line ends, blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizerSpec:
    """One kind of pre-tokenization.

    `pattern` is the regular expression of the words; None means GPT-2's own, built into the
    package's ByteLevel step.
    """

    name: str
    pattern: str | None = None
    single_digits: bool = False  # every digit is a word of its own, before the pattern applies
    compose: bool = False  # Unicode NFC first, as the published tokenizers of these models do
    whole_words: bool = False  # a word that is a token is taken whole, without merging
    adds_bos: bool = False  # what holds when the file does not say

    def pre_tokenizer(self) -> PreTokenizer:
        """Build the splitting step; its last stage maps bytes to printable characters."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        )
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Normalizer | None:
        """The step before splitting, if this kind has one."""
        from tokenizers import normalizers

        return normalizers.NFC() if self.compose else None


PRE_TOKENIZERS: dict[str, PreTokenizerSpec] = {
    spec.name: spec
    for spec in (
        PreTokenizerSpec("gpt-2"),
        PreTokenizerSpec("qwen2", pattern=_WORDS % r"\p{N}", compose=True),
        PreTokenizerSpec(
            "llama-bpe", pattern=_WORDS % r"\p{N}{1,3}", whole_words=True, adds_bos=True
        ),
        PreTokenizerSpec("olmo", compose=True),
        PreTokenizerSpec("smollm", single_digits=True),
    )
}


def pre_tokenizer_spec(name: str) -> PreTokenizerSpec:
    """Look a GGUF pre-tokenizer name up.

    Raises UnsupportedModelError, listing the known names, for any other.
    """
    spec = PRE_TOKENIZERS.get(name)
    if spec is None:
        raise UnsupportedModelError(
            f"the model's pre-tokenizer {name!r} is not known",
            f"known ones are: {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return spec
