"""Ask llama.cpp for the tokens of difficult strings, and store them for the tokenizer's tests.

    pip install llama-cpp-python gguf tokenizers
    python -m tools.make_tokenizer_goldens path/to/shared/vocab

Writes tests/generate/text/tokens/: strings.json.xz with the strings, a file for each vocabulary of
the folder, and one for each pre-tokenizer with the vocabulary of pair_vocabulary.py. Every file
holds the strings with that vocabulary's special tokens and, for all strings, the ids with special
tokens parsed and without, how a text begins, and which tokens end one. Fails if llama.cpp makes
something else of a string under another name of the same kind.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.gguf_writer import write_gguf
from tools.pair_vocabulary import pair_vocabulary
from tools.tokenizer_strings import difficult_strings, special_strings
from vkmoe.generate.text.byte_level import PRE_TOKENIZERS
from vkmoe.gguf_file import TensorInfo

TARGET = Path(__file__).parents[1] / "tests" / "generate" / "text" / "tokens"
# One name of each kind; llama.cpp's names, not ours, decide what the kinds are.
KINDS = (
    *("default", "gpt-2", "llama-bpe", "chatglm-bpe", "glm4", "qwen2", "qwen35", "smollm"),
    *("tekken", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3"),
    *("afmoe", "exaone-moe", "gemma4", "kimi-k2", "laguna", "sarvam-moe", "tiny_aya"),
)


def golden(path: Path) -> dict[str, Any]:
    """What llama.cpp makes of all strings with the vocabulary in `path`."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    strings = special_strings(_special_texts(llama_cpp, model))
    all_strings = [*difficult_strings(), *strings]
    return {
        "llama_cpp": llama_cpp.__version__,
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


def _no_tensor(tensor: TensorInfo) -> NDArray[np.uint8]:
    raise AssertionError(f"no tensor was asked for, not even {tensor.name}")


def compare(kind: str, document: dict[str, Any]) -> None:
    """Stop if a document is not the stored one of `kind`."""
    stored = json.loads(lzma.decompress((TARGET / f"{kind}.json.xz").read_bytes()))
    for key in ("parsed", "plain", "started", "ends"):
        if document[key] != stored[key]:
            raise SystemExit(f"llama.cpp does not make of texts what it makes under {kind}: {key}")


def _ask(path: Path, what: str, name: str) -> None:
    """Store or compare what llama.cpp makes of a vocabulary, in a process of its own."""
    print(what, name)
    command = [sys.executable, "-m", "tools.make_tokenizer_goldens", str(path), what, name]
    subprocess.run(command, check=True)


def main() -> None:
    """Store every golden, and compare those of other names."""
    if len(sys.argv) == 4:
        document = golden(Path(sys.argv[1]))
        (store if sys.argv[2] == "as" else compare)(sys.argv[3], document)
        return
    TARGET.mkdir(exist_ok=True)
    store("strings", [text.decode("latin-1") for text in difficult_strings()])
    for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
        _ask(path, "as", path.stem.removeprefix("ggml-vocab-"))
    names = [*KINDS, *sorted(PRE_TOKENIZERS.keys() - set(KINDS))]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path, kind = Path(folder) / f"{name}.gguf", PRE_TOKENIZERS[name].name
            write_gguf(path, pair_vocabulary(name), [], _no_tensor)
            _ask(path, "as" if name == kind else "like", f"pairs-{kind}")
            path.unlink()


if __name__ == "__main__":
    main()
