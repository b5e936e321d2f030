"""This module turns text into ids by cutting it into words and merging bytes (BPE), and back.

It owns the table of `tokenizer.ggml.pre` names and what each means for the `tokenizers` package,
and the printable spelling of bytes. Words are cut as in llama.cpp, for which the names were
invented: no Unicode normalisation, and in the newer OpenAI and Mistral kinds combining marks are
symbols. It does not own special tokens (tokenizer.py) or the vocabulary (vocabulary.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import PreTokenizer

from vkmoe.errors import PromptError
from vkmoe.generate.text.pieces import pieces

# English endings in either case; spelled out, as (?i:s) would match the long s (U+017F) too.
_ENDINGS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
# Blanks to their last line end; blanks but the last before a word; other blanks. No quantifier
# gives back what it took (*+, ++): the package's engine panics after ten million steps back.
_BLANKS = r"(?:[^\S\r\n]*+[\r\n]++)++|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str, rest: str) -> str:
    """Match endings, a word with at most one leading other character, digits, symbols, blanks."""
    return (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{rest}]+[\r\n]*|{_BLANKS}"
    )


def _cased(ending: str, digits: str) -> str:
    """Match words that end before an ASCII capital after a small letter; a slash joins symbols.

    Letters outside ASCII count as both. Capitals that no small letter follows are a word to the
    last letter that counts as small, or whole.
    """
    both = r"[\p{L}&&[^A-Za-z]]"
    words = rf"[\p{{L}}&&[^a-z]]*+[a-z][\p{{L}}&&[^A-Z]]*+|(?:[A-Z]*+{both}++)++|[A-Z]++"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?(?:{words}){ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


# Letters with case, without the scripts and additions that Unicode 11 or DeepSeek's list lacks.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}"
    r"\x{A78F}-\x{AB6F}\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{1DFFF}]]"
)
_DEEPSEEK_MARKS = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]"
_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&\S]+"
_DEEPSEEK3 = (
    r"[!-/:-~&&[^A-Za-z]][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _BLANKS
)
# Where words end in each of these kinds: no match of any pattern has such a character before the
# other. What no pattern matches stays together: in some kinds a sign and the blank behind it.
_CUT = (
    r"(?=[\0-\uFFFF])[^\W_](?=\n)|[A-Za-z0-9](?=[!-&(-/:-@\[-`{-~])|[A-Za-z](?=[0-9])"
    r"|[0-9](?=[A-Za-z])|[\u4E00-\u9FA5](?=[\u3002\uFF0C])"
)
_CUT_AT_BLANKS = rf"{_CUT}|\S(?= )"
_CUT_AT_WORDS = rf"{_CUT}|\S(?= [A-Za-z])|[A-Za-z0-9\u4E00-\u9FA5](?= )"
_LLAMA3 = _words(r"\p{L}", r"\p{N}{1,3}", r"\p{L}\p{N}")


@dataclass(frozen=True)
class PreTokenizerSpec:
    """Describes one kind of pre-tokenization.

    `patterns` are regular expressions (Oniguruma): each cuts the pieces the ones before it left
    into its matches and what lies between them.
    """

    name: str
    patterns: tuple[str, ...]
    aliases: str = ""  # other names that mean it
    whole_words: bool = False  # a word that is a token is taken whole, without merging
    adds_bos: bool = False  # what holds when the file does not say

    def pre_tokenizer(self) -> PreTokenizer:
        """Build the splitting step; its last stage maps bytes to printable characters."""
        steps: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def cuts(self) -> re.Pattern[str]:
        """Match characters behind which a text may be cut: both parts become what they were."""
        has_blanks = any(pattern.endswith(r"|\s+") for pattern in self.patterns)
        return re.compile(_CUT_AT_BLANKS if has_blanks else _CUT_AT_WORDS)


_KINDS = (
    PreTokenizerSpec(
        "gpt-2",
        (_GPT2,),
        "phi-2 olmo mpt jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling",
    ),
    PreTokenizerSpec("default", (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}")),
    PreTokenizerSpec(
        "llama-bpe",
        (_LLAMA3,),
        "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        whole_words=True,
        adds_bos=True,
    ),
    PreTokenizerSpec("chatglm-bpe", (_LLAMA3,), "smaug-bpe dbrx"),
    PreTokenizerSpec("glm4", (_LLAMA3,), "glm5", whole_words=True),
    PreTokenizerSpec(
        "qwen2",
        (_words(r"\p{L}", r"\p{N}", r"\p{L}\p{N}"),),
        "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2 bailingmoe "
        "bailingmoe2",
    ),
    PreTokenizerSpec("qwen35", (_words(r"\p{L}\p{M}", r"\p{N}", r"\p{L}\p{M}\p{N}"),)),
    PreTokenizerSpec(
        "smollm",
        (r"\p{N}", _GPT2),
        "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    PreTokenizerSpec("tekken", (_cased("", r"\p{N}"),), whole_words=True, adds_bos=True),
    PreTokenizerSpec(
        "gpt-4o",
        (_cased(f"(?:{_ENDINGS})?", r"\p{N}{1,3}"),),
        "llama4 kanana2 talkie minimax-m2",
    ),
    PreTokenizerSpec(
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            rf"\s?{_DEEPSEEK_MARKS}+",
            r"(?<!\s)\s++\z",
            _ASIAN,
            r"\p{N}+",
        ),
    ),
    PreTokenizerSpec("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    PreTokenizerSpec(
        "deepseek-v3",
        (r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", _DEEPSEEK3),
        "hunyuan-dense joyai-llm hy_v4",
    ),
)
PRE_TOKENIZERS = {name: kind for kind in _KINDS for name in (kind.name, *kind.aliases.split())}


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return the printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelCodec:
    """Encodes plain text; `ids` are all tokens, and `merges` pairs that make one, best first."""

    def __init__(
        self, ids: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizerSpec
    ) -> None:
        self._backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words))
        self._backend.pre_tokenizer = pre.pre_tokenizer()
        self._cuts = pre.cuts()
        self._numbers = tuple(range(len(ids)))  # one object for each id, not for each token
        # Bytes without a token of their own: the package would drop them silently.
        self._absent_bytes = {byte for char, byte in byte_alphabet().items() if char not in ids}

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Return the token ids of `text`, a piece between special tokens.

        Raises PromptError for bytes the vocabulary cannot spell, and for text without words.
        """
        return [i for piece in pieces(text, self.find_cut) for i in self.encode_piece(piece)]

    def encode_piece(self, text: str) -> list[int]:
        """Return the token ids of a text that is not cut. Raises as `encode` does."""
        if absent := self._absent_bytes and self._absent_bytes.intersection(text.encode()):
            raise PromptError(
                f"the model's vocabulary has no token for byte 0x{min(absent):02x} of the prompt",
                "leave that character out: this model cannot read it",
            )
        # As a batch: only then does the package let other threads of Python go on.
        found = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._numbers[i] for i in found]

    def find_cut(self, text: str, first: int, last: int) -> int | None:
        """Return the first place between two words in text[first:last]; None: there is none."""
        found = self._cuts.search(text, first, last)
        return found.end() if found else None

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes that a token with this text stands for."""
        table = byte_alphabet()
        return b"".join(bytes((table[c],)) if c in table else c.encode() for c in text)
