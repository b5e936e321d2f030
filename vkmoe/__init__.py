"""vkmoe: mixture-of-experts inference on Vulkan, for models whose experts do not fit the GPU."""

from __future__ import annotations

__version__ = "0.1.0"
