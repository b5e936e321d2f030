"""Makes a hash of a model, which tells whether something was computed with the same one."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack

import numpy as np

from vkmoe.models import ModelFile
from vkmoe.models.kept import Kept, holds_all
from vkmoe.models.layers.rope import rope_table

SAMPLE_BYTES = 512  # of each tensor: models that were trained on have the same shapes


def fingerprint(model: ModelFile, kept: Kept, longest: int) -> bytes:
    """Return a sha256 of a model, the first bytes of its tensors, and what layers keep of texts.

    Angles of some models depend on the `longest` text that there may be. Raises ModelFileError
    where the file cannot be read any more.
    """
    spec, tensors = model.spec, model.file.tensors
    layers = [(repr(layer.mixer), holds_all(layer.mixer, kept)) for layer in spec.kept_layers]
    shapes = [(name, tensor.shape, tensor.type) for name, tensor in tensors.items()]
    facts = [spec.architecture, spec.name, spec.n_vocab, layers, kept.kv_types, shapes]
    sums = hashlib.sha256(repr(facts).encode())
    for rope in spec.ropes:
        sums.update(rope_table(rope, 2, longest).tobytes())
    with ExitStack() as opened:
        files = [opened.enter_context(file) for file in model.file.reopen()]
        for tensor in tensors.values():
            sample = np.empty(min(SAMPLE_BYTES, tensor.n_bytes), np.uint8)
            files[tensor.part].read_into(sample, tensor.offset, f"tensor {tensor.name}")
            sums.update(sample.data)
    return sums.digest()
