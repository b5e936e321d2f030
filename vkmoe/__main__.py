"""This module makes `python -m vkmoe` run the command `vkmoe`."""

from __future__ import annotations

import sys

from vkmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
