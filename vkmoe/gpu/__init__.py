"""This package is the GPU layer: devices, buffers, programs and the backend that runs them."""
