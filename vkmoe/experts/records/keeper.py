"""Keeps the files a run leaves behind: `--expert-stats` and `--expert-profile`.

Owns where they lie, when they are read and written, and what happens when that fails. Does not own
what stands in them (report.py, profile.py).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.records.profile import load_profile, profile_text, profiled_model
from vkmoe.experts.records.report import FORMAT, ExpertReport, as_json, as_text
from vkmoe.experts.records.writing import (
    check_outputs,
    is_special,
    reason_against_writing,
    write_whole,
)
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo

__all__ = ["RecordKeeper", "record_outputs"]

log = logging.getLogger("vkmoe")
_OURS = re.compile(rf'{FORMAT}\n|\{{\s*"format":\s*"{FORMAT}"'.encode())


class _File(NamedTuple):
    what: str
    path: Path
    text: str


class RecordKeeper:
    """Reads the profile before the model is loaded, and writes both files at the end.

    `seed` are the counts of the profile [n_keys]; None without one, and for a dense model.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, expert_layers: Sequence[Sequence[TensorInfo]]
    ) -> None:
        """Check the paths and read the profile; `expert_layers` are empty for a dense model.

        Raises UsageError for paths that would destroy something, VkmoeError for a profile that is
        damaged or of another model. A path that cannot be written is a warning in the log.
        """
        self._stats = Path(config.expert_stats) if config.expert_stats is not None else None
        self._profile = Path(config.expert_profile) if config.expert_profile is not None else None
        self._files: list[_File] = []
        self.seed: NDArray[np.float64] | None = None
        check_outputs(record_outputs(config))
        if self._stats is not None:
            _refuse_foreign(self._stats)
        if self._profile is not None and not expert_layers:
            log.warning(
                "the model has no experts: the expert profile %s is not used", self._profile
            )
            self._profile = None
        if self._profile is not None:
            tensors = [tensor for layer in expert_layers for tensor in layer]
            self._model = profiled_model(spec, len(expert_layers), tensors)
            self.seed = load_profile(self._profile, self._model)
            if self.seed is not None and self.seed.any():
                log.info("expert profile %s: the most used experts come first", self._profile)
        for what, path in (("statistics", self._stats), ("profile", self._profile)):
            reason = reason_against_writing(path) if path is not None else None
            if reason:
                log.warning("the expert %s will not be written at the end: %s", what, reason)

    def take(self, report: ExpertReport, counts: NDArray[np.float64]) -> None:
        """Note what `write` writes: the statistics, and the decayed counts [n_keys].

        A run without a token replaces no statistics, and neither begins nor changes a profile.
        """
        self._files.clear()
        paths = _stats_paths(self._stats) if self._stats is not None else ()
        if report.n_tokens or not any(map(os.path.isfile, paths)):
            for path in paths:
                text = as_json(report) if path.suffix == ".json" else as_text(report)
                self._files.append(_File("statistics", path, text))
        if report.n_tokens and self._profile is not None:
            self._files.append(_File("profile", self._profile, profile_text(self._model, counts)))

    def write(self) -> None:
        """Write what was taken, once. One file that fails does not keep the others from it.

        Raises VkmoeError naming what failed; while another exception is on its way, or is being
        handled, it logs that instead. Does nothing when nothing was taken.
        """
        failures = []
        for what, path, text in self._files:
            try:
                write_whole(path, text)
            except OSError as error:
                reason = error.strerror or error
                failures.append(f"the expert {what} could not be written to {path}: {reason}")
            else:
                log.info("wrote the expert %s to %s", what, path)
        self._files.clear()
        if sys.exc_info()[1] is not None:
            for failure in failures:
                log.error(failure)
        elif failures:
            hint = "give a path in a folder that exists and where you may write"
            raise VkmoeError("; ".join(failures), hint)


def record_outputs(config: EngineConfig) -> list[tuple[str, Path]]:
    """Return the option and path of every file that the records of a run are written to."""
    outputs = []
    if config.expert_stats is not None:
        outputs += [("--expert-stats", path) for path in _stats_paths(Path(config.expert_stats))]
    if config.expert_profile is not None:
        outputs.append(("--expert-profile", Path(config.expert_profile)))
    return outputs


def _stats_paths(path: Path) -> tuple[Path, ...]:
    """Return where the statistics go, the path that was asked for first.

    `stats.txt` and `stats.json` belong together, whichever is asked for; to any other name of the
    text, .json is appended. A pipe has nothing beside it.
    """
    if is_special(path):
        return (path,)
    if path.suffix == ".json":
        return path, path.with_suffix(".txt")
    return path, path.with_suffix(".json") if path.suffix == ".txt" else Path(f"{path}.json")


def _refuse_foreign(stats: Path) -> None:
    """Refuse statistics whose second file would replace one that we did not write as statistics."""
    for path in _stats_paths(stats)[1:]:
        if os.path.isfile(path) and not _is_ours(path):
            raise UsageError(
                f"--expert-stats {stats} would overwrite {path} too, which holds something else",
                "give another name, or move that file away",
            )


def _is_ours(path: Path) -> bool:
    """Return whether a file is empty or begins as statistics do."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(99)
    except OSError:
        return False
    return not head or _OURS.match(head) is not None
