"""A GPU day: all that a machine without network needs is packed here, and measured there.

Owns the names of what is packed: `pack` makes them, and `run` needs them all.
"""

PACKED = ("wheels", "kp.tar.gz", "sdk.tar.xz", "windows.tar.xz", "llama.tar.xz")
WHEELS, KOMPUTE, SDK, WINDOWS, LLAMA = PACKED
LLAMA_BENCH = "llama-bench.xz"  # the program, once a part has built it
