"""The small byte-level BPE vocabulary that all tiny models share."""

from __future__ import annotations

import gguf

from tools.synthetic.vocabulary import byte_tokens

_MERGES = """
Ġ t|Ġ a|i n|h e|r e|o n|Ġt he|e r|Ġ s|a t|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d|Ġ f|in g|Ġ p|o u
Ġa n|a l|a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|l e|a s|Ġ re|s e|l f|se lf|Ċ Ġ
"""
MERGES = tuple(pair for line in _MERGES.split("\n") for pair in line.split("|") if pair)


def vocabulary() -> list[str]:
    """`<|endoftext|>`, the bytes, one token per merge and one control token at the end."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return ["<|endoftext|>", *byte_tokens(), *merged, "<|end|>"]


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add the `tokenizer.ggml.*` keys of the small byte-level BPE."""
    tokens = vocabulary()
    control = {tokens[0], tokens[-1]}
    types = [gguf.TokenType.CONTROL if t in control else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
