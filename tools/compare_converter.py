"""Hold vkmoe on files of llama.cpp's own converter against transformers, by hand.

Owns: running each file that `convert_tiny_models.py` wrote, and printing how far its logits are
from the stored ones of transformers, relative to the largest; then the same of the layer that
guesses tokens ahead.  No test needs it.

    python -m tools.compare_converter --folder FOLDER [NAME ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from tests.engine.test_guesses import guessed
from tests.engine.test_logits import error, run
from vkmoe.choices import DraftWay
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.models import open_model
from vkmoe.models.ahead_file import with_ahead


def differences(path: Path) -> str:
    """The largest difference of logits, and of guesses where the file has them; or why not."""
    with np.load(path.with_suffix(".npz")) as stored:
        arrays = dict(stored)
    tokens = arrays["tokens"]
    draft: DraftWay = "mtp" if "guess_logits" in arrays else "none"
    config = EngineConfig(cache_type_k="f32", cache_type_v="f32", draft=draft, parallel=2)
    try:
        with Engine(with_ahead(open_model(path), config), config) as engine:
            found = f"{error(run(engine, tokens)[0], arrays['logits']):.2e}"
            if draft == "mtp":
                cuts = list(range(1, len(tokens)))
                logits = guessed(engine, tokens.tolist(), cuts, "decode")
                found += f"  guesses {error(logits, arrays['guess_logits']):.2e}"
            return found
    except VkmoeError as problem:
        return str(problem)


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all)")
    options = parser.parse_args()
    for path in sorted(options.folder.glob("*.gguf")):
        if not options.names or path.stem in options.names:
            print(f"{path.stem:24} {differences(path)}", flush=True)


if __name__ == "__main__":
    main()
