"""This package is the command line: one module per command, options made from vkmoe.config.

`main` is the entry point. Nothing here is imported by the rest of the package, and nothing heavy
(numpy, the tokenizer, the GPU) is imported before a command needs it.
"""

from __future__ import annotations

from vkmoe.cli.app import main

__all__ = ["main"]
