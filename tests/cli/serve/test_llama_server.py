"""Command lines that were written for llama-server."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Run
from vkmoe.cli.serve.llama_server import translated


@pytest.mark.parametrize(
    ("words", "kept", "idle"),
    [
        ("m.gguf -c 8192 --port 1", "m.gguf -c 8192 --port 1", ""),
        ("-hf o/r --hf-file r-Q4_K_M.gguf", "-hf o/r:Q4_K_M", ""),
        ("--n-predict 5 --temperature=0.5", "--max-tokens 5 --temp 0.5", ""),
        ("-ngl 99 --n-gpu-layers all", "--gpu-layers 99", ""),
        ("-fa -m m.gguf -fa on --jinja", "-m m.gguf", "-fa -fa --jinja"),
        ("--cache-reuse 256 -sps 0.5 --no-ui", "--no-webui", "--cache-reuse -sps"),
        ("-b 64", "--ubatch-size 64", ""),
        ("-b 2048", "", ""),
        ("-b 64 -ub 32", "-ub 32", ""),
        ("--reasoning-budget 0", "--reasoning off", ""),
        ("--ssl-key-file k --lora l", "--ssl-key-file k --lora l", ""),
        ("-n -1 --alias --jinja", "-n -1 --alias", "--jinja"),
    ],
)
def test_flags_are_renamed_kept_or_left_out(words: str, kept: str, idle: str) -> None:
    found = translated(words.split())
    assert (" ".join(found.words), " ".join(found.idle)) == (kept, idle)


def test_flags_that_would_change_who_may_use_the_server_are_refused(run: Run) -> None:
    done = run("serve", "--ssl-key-file", "key.pem")
    assert done.code == 2 and "No such option: --ssl-key-file" in done.err
