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


def live_objects_but_fences() -> dict[str, int]:
    """The same while a device stays open: it keeps as many fences as it ever needed at once."""
    return {kind: n for kind, n in live_objects().items() if kind != "fence"}
