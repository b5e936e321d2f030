"""Counts the bytes of weights as kernels read them, and reads them from the file into memory."""
