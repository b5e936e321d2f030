"""This module spells the names between which options, plans and decisions choose, each once.

The meaning of a choice is described where it is made: config.py for what a user may ask, placement/
for what is decided, experts/decide/ for policies. Options and the page describe a policy by the few
words that stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Executor = Literal["fused", "stepped"]
KvType = Literal["f32", "f16", "q8_0", "q5_1", "q4_0"]  # of a KV cache
Layout = Literal["planes", "file"]  # of rows of weights where kernels read them (quants/layouts.py)

ExpertsIn = Literal["device", "host", "cache", "cpu"]
ModeName = Literal["resident", "cache", "hybrid", "cpu"]
MissWay = Literal["read", "gather"]
TuningSource = Literal["remembered", "table"]
DraftWay = Literal["none", "lookup", "mtp"]
Pooling = Literal["none", "mean", "cls", "last"]  # what the states of a text's tokens become
CopyTiming = Literal["overlap", "wait"]
SlotSharing = Literal["layer", "global"]

# What the device calls the memory it is asked for; "tensors" are Kompute's.
BufferName = Literal[
    "weights",
    "host weights",
    "experts",
    "expert slots",
    "expert pool",
    "gathered experts",
    "brought experts",
    "expert table",
    "handed rows",
    "staged experts",
    "joined rows",
    "KV cache",
    "copied states",
    "kept texts",
    "tensors",
    "params",
    "readback",
    "staging",
]

PolicyName = Literal["lru", "slru", "lfru", "forecast"]
POLICIES_IN_WORDS: Mapping[PolicyName, str] = {  # which expert leaves
    "lru": "the one unused for longest",
    "slru": "the least used of those that were not used again soon",
    "lfru": "the one with the least frequent and recent uses",
    "forecast": "the one that the next tokens are least likely to use",
}
