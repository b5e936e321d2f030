"""A study: would packed dots of 8-bit activations make decode faster? `study.py` runs it, by hand.

dot.glsl takes the place of the shaders' own, so that the kernels are vkmoe's in all else.
"""
