"""What an expert cache did since it was opened, as plain numbers for statistics and reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheCounters"]


@dataclass(frozen=True)
class CacheCounters:
    """Totals since the model was loaded; sizes in bytes."""

    n_uploads: int = 0  # experts copied into a slot
    upload_bytes: int = 0
    n_evictions: int = 0  # experts that lost their slot to another
    missed_bytes: int = 0  # read from host memory because the expert had no slot
    n_table_writes: int = 0  # versions of the expert table written after the first
    n_failed_uploads: int = 0
