"""The Vulkan objects that live now, without the garbage that earlier tests left.

A collection that happens to run between two counts frees what a failed construction of some earlier
test held, and the counts differ by what the test at hand never touched.
"""

from __future__ import annotations

import gc

from vkmoe.gpu import _native as native


def live_objects() -> dict[str, int]:
    """How many there are of each kind, after a collection: the count to begin a test with."""
    gc.collect()
    return native.live_objects()
