"""The CPU as a device: programs run by ggml's kernels on threads of our own."""
