"""This package is `vkmoe bench`: kernels, transfers and decoding, checked before they are timed."""
