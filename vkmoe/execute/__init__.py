"""Records the program of a model, whole or cut into segments, and runs what is recorded.

A program is cut for two reasons, and neither changes a bit. Where an expert may be neither in a
slot nor in host memory, or with `--executor stepped`, a submit ends at each router: the host reads
which experts come next, has the missing ones read from the file, publishes a table and submits the
next step. Where the bytes that a token may miss take more than a quarter of a second of the link,
the program is cut at the borders of layers, because drivers reset a GPU whose submit takes seconds.

Where the CPU computes experts beside a GPU, a segment ends with a hand-over. The GPU copies the
normed rows and the routing to host memory and goes on with its own experts; the CPU
(`cpu_worker.py`) runs a program of that layer; the GPU then adds the result to the hidden state.
A segment that needs what the CPU computes is submitted when that is done.

`expert_memory.py` makes the memory that experts come and go in, as a plan has it.
"""
