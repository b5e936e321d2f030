"""What an expert cache did since it was opened, as plain numbers for statistics and reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheCounters", "PoolCounters"]


@dataclass(frozen=True)
class CacheCounters:
    """Totals since the model was loaded; sizes in bytes, times in nanoseconds."""

    n_uploads: int = 0  # experts copied into a slot
    upload_bytes: int = 0
    n_evictions: int = 0  # experts that lost their slot to another
    missed_bytes: int = 0  # read from host memory because the expert had no slot
    n_table_writes: int = 0  # versions of the expert table written after the first
    n_failed_uploads: int = 0
    n_landed: int = 0  # experts that got their slot while they were read, without a copy
    n_hinted: int = 0  # uploads begun because a predictor guessed them
    n_cancelled: int = 0  # uploads taken back before they began
    stall_ns: int = 0  # waited for copies between two submits


@dataclass(frozen=True)
class PoolCounters:
    """Totals of a host pool smaller than the model; sizes in bytes, times in nanoseconds."""

    n_uses: int = 0  # experts that tokens asked for and that had no slot
    n_hits: int = 0  # of them already in the pool
    n_reads: int = 0  # experts read from the file, those at the start too
    read_bytes: int = 0
    n_failed: int = 0
    n_hinted: int = 0  # reads begun because a predictor guessed them
    n_cancelled: int = 0
    stall_ns: int = 0  # waited for the file while a token was computed
    read_ns: int = 0  # that the reads took, without those at the start
    hidden: float | None = None  # the part of it while something was computed; None: no such read
    n_right: int = 0  # of n_hinted used by the very layer that the guess was about
