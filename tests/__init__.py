"""The tests of vkmoe; folders are named as those of the package.

What guards the law and the kernels:

- Every kernel is compared with its NumPy twin, and by `vkmoe selftest` on the user's own device.
- Tests delete each barrier in turn, and an independent checker must object.
- The simulator and the engine have the same hits, token by token.
- Slots are poisoned before a copy; every buffer is held against its line of the plan.
- Threads that move bytes are delayed, failed and cancelled; files are harmed while they are read.
- The validation layer runs over a whole generation, and must report a barrier left out on purpose.
- lavapipe and SwiftShader, which share no code, give the same text.
- AMD's, NVIDIA's and Intel's compilers take every pipeline; limits of registers and loads hold.
"""
