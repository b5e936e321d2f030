"""This module is the part of `LLM` that saves a conversation's state to a file, and restores it.

What a file holds is the subject of generate/regions/state_files.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from vkmoe.errors import UsageError
from vkmoe.generate.checks import check_kind, check_path
from vkmoe.generate.regions.state_files import StateCounts
from vkmoe.llm.turns import Turns


class SavedStates:
    """Gives `LLM` its methods for files with the state of a conversation."""

    _turns: Turns

    def save_state(self, path: str | os.PathLike[str], region: int = 0) -> StateCounts:
        """Write the state of the conversation that was generated last to a file.

        `region` says which one of `parallel` conversations it is. A file that was saved before is
        replaced. Returns how many tokens and bytes were written. Raises StateFileError where there
        is no conversation, or the file cannot be written; UsageError while a reply is under way.
        """
        found = _checked(path, region)
        with self._turns.taken() as scheduler:
            return scheduler.save(region, found)

    def restore_state(self, path: str | os.PathLike[str], region: int = 0) -> StateCounts:
        """Read a conversation's state from a file, so that prompts go on from there.

        The next prompt that begins with its tokens computes only what comes behind them. Returns
        how many tokens and bytes were read. Raises StateFileError where the file cannot be read, is
        damaged, or was saved with another model or other types of KV caches; UsageError while a
        reply is under way.
        """
        found = _checked(path, region)
        with self._turns.taken() as scheduler:
            return scheduler.restore(region, found)


def _checked(path: str | os.PathLike[str], region: int) -> Path:
    """Check what was given. Raises UsageError."""
    check_kind("region", region, int, "give the number of a region, from 0 on")
    if path is None:
        raise UsageError("path is None", "give the name of a file")
    check_path("path", path)
    return Path(path)
