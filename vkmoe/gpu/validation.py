"""Shows that the validation layer reports a missing barrier, before its silence is taken as proof.

Which setting switches synchronisation validation on has changed between releases of the layer, and
an environment variable or a settings file can switch it off. A layer that does not look is silent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vkmoe.gpu.kernels import spirv_words

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["HAZARD", "run_with_a_missing_barrier"]

HAZARD = "SYNC-HAZARD"  # begins the name of every message of synchronisation validation
N_WORDS = 16  # shaders/include/params.glsl: the kernel reads its parameters from the first tensor
WORKGROUP_SIZE = 1


def run_with_a_missing_barrier(device: _native.Device) -> None:
    """Run a dispatch that reads what the dispatch before it wrote, with no barrier in between.

    Both run `finish`, the smallest kernel. Nothing depends on what it computes here: only the
    validation layer's messages count. Raises the extension's VulkanError.
    """
    first, second, third = (device.tensor(N_WORDS, "positive control") for _ in range(3))
    spirv = spirv_words("finish")
    recorder = device.recorder()
    for source, target in ((first, second), (second, third)):
        kernel = device.kernel(spirv, [source, target], [WORKGROUP_SIZE], 0, "finish")
        recorder.dispatch(kernel, (1, 1, 1))
    device.submit(recorder.finish()).wait()
