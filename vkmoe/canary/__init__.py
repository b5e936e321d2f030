"""Compares the kernels that a model uses with their NumPy twins, before its weights are loaded.

A driver that compiles a kernel wrongly gives fluent nonsense. So each pipeline of a model is
compared once for each driver and device. One that is wrong is replaced by a plainer one, or else
the device is refused. `programs.py` finds the pipelines, `check.py` compares and decides.
"""
