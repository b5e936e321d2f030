"""This package measures how kernels are best launched on a device, for `vkmoe tune`."""
