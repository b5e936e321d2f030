"""One folder for each group of kernels: what appends them, their twins, their cases and their cost.

`operations.py` checks shapes, chooses the variant and appends the dispatch; `twins.py` computes the
same in NumPy, in float64; `cases.py` compares both on a device, in shapes that self-test, tests,
benchmarks and `vkmoe tune` share, and counts the bytes that a dispatch reads.
"""
