"""Typed face of the extension that looks at the processor, and runs on any of its architecture.

Missing where vkmoe was built with -DVKMOE_CPU=OFF.
"""

def features() -> list[str]:
    """Name what this processor has, and the system lets programs use."""

def variants() -> list[tuple[str, list[str]]]:
    """List the variants of this build, the most particular last, and the features each needs."""
