"""This package knows where the experts lie, and how they are reached.

`decide/` chooses which experts should be where, without bytes; `store/` holds and moves the bytes;
`records/` counts; `study/` replays recorded routing. C++ (`native/`) has the longest sums.

An expert in a memory is absent, waiting (its copy has not begun), copying or present. It landed if
kernels stored it in a landing slot while they read it, and arrived if it was copied whole. Where
device and host memory together hold the model, an expert that is next to leave its slot is backed
first: copied to a spare place in host memory. The worth of an expert is the uses expected of it.
"""
