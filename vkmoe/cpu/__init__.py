"""The CPU as a device: programs run by ggml's kernels on threads of our own.

Weights stay where the file is mapped, and a submit has run when it returns. Vectors are rounded to
the form that ggml multiplies; rows of weights are shared out among threads in contiguous ranges,
and a thread without rows takes some of another's. Decoded rows are multiplied one by one, rows of
prompts in ggml's tiles, always: so their bits depend on nothing else. The two kinds of rows differ
by up to a hundredth of the largest logit, because a difference in the last bit may round an
activation to another of its 256 steps. Where the processor has AVX-512's VNNI, the types that most
files have are decoded by kernels of our own (native/vnni.cpp), which read memory faster.
"""
