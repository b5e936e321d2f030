"""A vocabulary of 152k tokens with merges: opened and handed over in less than 100 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.gguf_writer import write_gguf
from tools.make_synthetic_model import PRESETS, model_metadata
from vkmoe.gguf_file import open_gguf

# In a process of its own, so that the peak is this file's and nothing else's. VmHWM, because
# getrusage's peak survives exec and would be the test runner's.
MEASURE = """
import sys
from vkmoe.gguf_file import open_gguf
def peak():
    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])
before = peak()
with open_gguf(sys.argv[1]) as file:
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = file.strings("tokenizer.ggml.merges")
    kinds = file.numbers("tokenizer.ggml.token_type")
added = peak() - before
print(len(tokens), len(merges), len(kinds), added / 1024)
"""


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf"
    name = "qwen3-30b-a3b"
    write_gguf(path, model_metadata(name, PRESETS[name], "q4_k_m"), [], lambda _: pytest.fail(""))
    return path


def measured(path: Path) -> tuple[list[int], float]:
    """([tokens, merges, kinds], MB added to the peak)."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [int(word) for word in words[:3]], float(words[3])


def test_opening_a_large_vocabulary(synthetic: Path) -> None:
    counts, added = measured(synthetic)
    assert counts == [151936, 151936 - 257, 151936]
    assert added < 100


def test_tokens_and_merges_arrive_as_they_were_written(synthetic: Path) -> None:
    with open_gguf(synthetic) as file:
        tokens = file.strings("tokenizer.ggml.tokens")
        merges = file.strings("tokenizer.ggml.merges")
    assert tokens[-1] == "<|endoftext|>" and tokens[ord("a")] == "a" and tokens[ord(" ")] == "Ġ"
    known = set(tokens)
    assert len(known) == len(tokens)
    assert all(set(rule.split(" ")) <= known for rule in merges)
    assert all(
        rule.replace(" ", "") == token for rule, token in zip(merges, tokens[256:-1], strict=True)
    )
