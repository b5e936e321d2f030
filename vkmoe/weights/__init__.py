"""Counts the bytes of weights as kernels read them, and brings them from the file to memory."""
