"""This module knows the tokens with a meaning of their own, and finds them in a text.

It owns what a token's text tells where the file says nothing: the ends of a generation and the
marks of a dialogue; and the cutting of a text at its special tokens. Both are as in llama.cpp,
whose files these are. It does not own the file's own statements (vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

__all__ = ["CONTROL_TEXTS", "SpecialTokens", "end_texts", "shown_texts"]

# A token with one of these texts ends a generation, whatever the file declares.
_ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
_INFILLING = """
    <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>
    <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>
    <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>
    <|prefix|> <|suffix|> <|middle|>
"""
_END_TEXTS = frozenset(_ENDS.split())
# Control tokens whatever their type.
CONTROL_TEXTS = frozenset((_ENDS + _INFILLING).split())
# The channels of gpt-oss are part of its reply: without the marks they would run together.
_SHOWN_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


def shown_texts(ids: Mapping[str, int]) -> frozenset[str]:
    """Return marks that show in a reply. <|end|> only ends a message where others end it all."""
    calls, leaves = ids.keys() & {"<|call|>", "<|calls|>"}, ids.keys() & {"<|return|>", "<|flush|>"}
    return _SHOWN_TEXTS | {"<|end|>"} if calls and leaves else _SHOWN_TEXTS


def end_texts(ids: Mapping[str, int]) -> frozenset[str]:
    """Return the texts of the tokens that end a generation in a vocabulary with these tokens."""
    ends = _END_TEXTS
    if {"[gMASK]", "<|observation|>"} <= ids.keys():  # GLM: the next to speak is someone else
        ends |= {"<|user|>", "<|observation|>"}
    return ends - shown_texts(ids)


class SpecialTokens:
    """Finds special tokens in a text before it is cut into words.

    `on_request` are matched only where special tokens are asked for, `always` everywhere. After
    one of `swallow_blanks` the blanks that follow are dropped.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        on_request: Collection[int],
        always: Collection[int],
        swallow_blanks: Collection[int] = (),
    ) -> None:
        longest_first = sorted({*on_request, *always}, key=lambda i: (-len(tokens[i].encode()), i))
        self._all = [(i, tokens[i]) for i in longest_first]
        self._always = [(i, text) for i, text in self._all if i in always]
        self._swallowing = frozenset(swallow_blanks)

    def cut(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut `text` into ids of special tokens and the non-empty texts between them.

        The longest token is looked for first, everywhere, then the next in what is left.
        """
        parts: list[str | int] = [text] if text else []
        for token_id, token in self._all if parse_special else self._always:
            if token in text:
                swallows = token_id in self._swallowing
                parts = list(_cut_all(parts, token, token_id, swallows))
        return parts


def _cut_all(
    parts: Iterable[str | int], token: str, token_id: int, swallows: bool
) -> Iterator[str | int]:
    """Put `token_id` where `token` stands in the texts among `parts`."""
    for part in parts:
        if isinstance(part, int):
            yield part
            continue
        for i, piece in enumerate(_pieces(part, token, swallows)):
            if i:
                yield token_id
            if piece:
                yield piece


def _pieces(text: str, token: str, swallows: bool) -> list[str]:
    pieces = text.split(token)
    return [pieces[0], *(x.lstrip(" \t\n\v\f\r") for x in pieces[1:])] if swallows else pieces
