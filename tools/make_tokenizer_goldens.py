"""Ask llama.cpp for the tokens of difficult strings, and store them for the tokenizer's tests.

    pip install llama-cpp-python
    python -m tools.make_tokenizer_goldens path/to/shared/vocab

Writes tests/generate/tokens/: strings.json.xz with the strings, and a file for each vocabulary and
each pre-tokenizer that is tried on a vocabulary of another kind. Every file holds the text strings
with that vocabulary's special tokens and, for all strings, the ids with special tokens parsed and
without. llama.cpp's version and the vocabulary's name are in the file.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.tokenizer_strings import difficult_strings, special_strings

TARGET = Path(__file__).parents[1] / "tests" / "generate" / "tokens"
# Pre-tokenizers without a vocabulary there, and the vocabulary they are tried on.
BORROWED = {
    "default": "gpt-2",
    "smollm": "gpt-2",
    "chatglm-bpe": "llama-bpe",
    "glm4": "llama-bpe",
    "tekken": "llama-bpe",
    "gpt-4o": "llama-bpe",
    "deepseek-v3": "deepseek-llm",
}


def golden(path: Path, pre: str | None) -> dict[str, Any]:
    """What llama.cpp makes of all strings with the vocabulary in `path`."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    overrides = {} if pre is None else {"tokenizer.ggml.pre": pre}
    model = llama_cpp.Llama(
        str(path), vocab_only=True, verbose=False, kv_overrides=overrides or None
    )
    special = _special_texts(llama_cpp, model)
    strings = special_strings(special)
    all_strings = [*difficult_strings(), *strings]
    return {
        "llama_cpp": llama_cpp.__version__,
        "vocabulary": path.stem.removeprefix("ggml-vocab-"),
        "pre": pre,
        "special": [text.decode("latin-1") for text in strings],
        "parsed": [model.tokenize(text, add_bos=False, special=True) for text in all_strings],
        "plain": [model.tokenize(text, add_bos=False, special=False) for text in all_strings],
        "started": model.tokenize(b"Hello", add_bos=True, special=True),
        "ends": [i for i in range(model.n_vocab()) if _ends(llama_cpp, model, i)],
    }


def _special_texts(llama_cpp: Any, model: Any) -> list[str]:
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    wanted = (
        llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
    )
    ids = range(model.n_vocab())
    special = [i for i in ids if llama_cpp.llama_vocab_get_attr(vocab, i) & wanted]
    return [llama_cpp.llama_vocab_get_text(vocab, i).decode() for i in special]


def _ends(llama_cpp: Any, model: Any, token_id: int) -> bool:
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    return bool(llama_cpp.llama_vocab_is_eog(vocab, token_id))


def store(name: str, document: Any) -> None:
    """Write a document as small as JSON gets; the same bytes each time."""
    text = json.dumps(document, separators=(",", ":"))
    (TARGET / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def main() -> None:
    """Store every golden, each vocabulary in a process of its own."""
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        name, pre = sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
        store(pre or name, golden(folder / f"ggml-vocab-{name}.gguf", pre))
        return
    TARGET.mkdir(exist_ok=True)
    store("strings", [text.decode("latin-1") for text in difficult_strings()])
    names = [path.stem.removeprefix("ggml-vocab-") for path in sorted(folder.glob("*.gguf"))]
    for arguments in [[name] for name in names] + [[v, k] for k, v in BORROWED.items()]:
        print(*arguments)
        command = [sys.executable, "-m", "tools.make_tokenizer_goldens", str(folder), *arguments]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
