"""This package makes weights: quantisers from float32, and random blocks.

The tools that write models and the tests use it; what vkmoe runs only decodes (vkmoe/quants).
"""

from __future__ import annotations

from tools.quantise.quantisers import quantise
from tools.quantise.random_blocks import random_weights

__all__ = ["quantise", "random_weights"]
