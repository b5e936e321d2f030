"""Studies: would 8-bit activations make decode and prompts faster? Both are run by hand.

`study.py` compares kernels of decode with packed dots, `matrices.py` those of prompts with 8-bit
matrices. dot.glsl and tile.glsl take the place of the shaders' own, so that the kernels are vkmoe's
in all else.
"""
