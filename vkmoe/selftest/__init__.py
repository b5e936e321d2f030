"""`vkmoe selftest` compares every kernel variant with its NumPy twin, on the user's own device.

The cases are also what the kernel tests are made of: one description per kernel drives both.
"""

from vkmoe.selftest.suite import Case, run

__all__ = ["Case", "run"]
