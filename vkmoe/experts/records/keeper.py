"""Keeps the files a run leaves behind: `--expert-stats` and `--expert-profile`.

Owns where they lie, when they are read and written, and what happens when that fails. Does not own
what stands in them (report.py, profile.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.records.profile import load_profile, profiled_model, save_profile
from vkmoe.experts.records.report import FORMAT, ExpertReport, as_document, as_text
from vkmoe.experts.records.writing import (
    is_special,
    reason_against_writing,
    refuse_to_replace,
    same_file,
    write_whole,
)
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo

__all__ = ["RecordKeeper", "stats_paths"]

log = logging.getLogger("vkmoe")
_HINT = "give a path in a folder that exists and where you may write"
_OURS = re.compile(rf'{FORMAT}\n|\{{\s*"format":\s*"{FORMAT}"'.encode())
_Writing = tuple[str, Path, Callable[[], None]]  # of what, where, how


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
        self._report: ExpertReport | None = None
        self._counts: NDArray[np.float64] | None = None
        self.seed: NDArray[np.float64] | None = None
        _refuse_dangerous(self._stats, self._profile)
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

        Without a token there is nothing to add to a profile, and none is begun.
        """
        self._report, self._counts = report, counts

    def write(self) -> None:
        """Write what was taken, once. One file that fails does not keep the other from it.

        Raises VkmoeError naming what failed; while another exception is on its way, or is being
        handled, it logs that instead. Does nothing when nothing was taken.
        """
        another_error = sys.exc_info()[1] is not None
        failed: dict[tuple[str, str], list[str]] = {}  # paths by what was to be written and reason
        for what, path, write in self._writings():
            try:
                write()
            except OSError as error:
                failed.setdefault((what, error.strerror or str(error)), []).append(str(path))
            else:
                log.info("wrote the expert %s to %s", what, path)
        self._report = self._counts = None
        failures = [
            f"the expert {what} could not be written to {' and '.join(paths)}: {reason}"
            for (what, reason), paths in failed.items()
        ]
        if another_error:
            for failure in failures:
                log.error(failure)
        elif failures:
            raise VkmoeError("; ".join(failures), _HINT)

    def _writings(self) -> Iterator[_Writing]:
        report, counts, profile = self._report, self._counts, self._profile
        nothing_new = report is not None and not report.n_tokens and self._stats_exist()
        if report is not None and self._stats is not None and not nothing_new:
            text_path, json_path = stats_paths(self._stats)
            only = self._stats if is_special(self._stats) else None  # a pipe has nothing beside it
            if only in (None, text_path):
                yield "statistics", text_path, lambda: _write_text(text_path, report)
            if only in (None, json_path):
                yield "statistics", json_path, lambda: _write_json(json_path, report)
        if report is not None and report.n_tokens and counts is not None and profile is not None:
            yield "profile", profile, lambda: save_profile(profile, self._model, counts)

    def _stats_exist(self) -> bool:
        """Return whether there are statistics that a run without tokens must not replace."""
        return self._stats is not None and any(map(os.path.isfile, stats_paths(self._stats)))


def _write_text(path: Path, report: ExpertReport) -> None:
    write_whole(path, as_text(report).encode("utf-8", "replace"))


def _write_json(path: Path, report: ExpertReport) -> None:
    text = json.dumps(as_document(report), indent=1, allow_nan=False)
    write_whole(path, text.encode() + b"\n")


def stats_paths(path: Path) -> tuple[Path, Path]:
    """Return where text and JSON of the statistics go.

    `stats.txt` and `stats.json` belong together, whichever is asked for; to any other name of the
    text, .json is appended. The one that was not asked for by its name never replaces a file that
    is something else (RecordKeeper raises UsageError).
    """
    if path.suffix == ".json":
        return path.with_suffix(".txt"), path
    return path, path.with_suffix(".json") if path.suffix == ".txt" else Path(f"{path}.json")


def _refuse_dangerous(stats: Path | None, profile: Path | None) -> None:
    """Refuse files that would replace a model, each other, or one that was not named."""
    if profile is not None:
        refuse_to_replace("--expert-profile", profile)
    if stats is None:
        return
    refuse_to_replace("--expert-stats", stats)
    both = stats_paths(stats)
    for path in both:
        if profile is not None and same_file(path, profile):
            raise UsageError(
                f"--expert-stats {stats} and --expert-profile {profile} would overwrite each other",
                "give one of them another name",
            )
        if path != stats and not is_special(stats) and _is_foreign(path):
            raise UsageError(
                f"--expert-stats {stats} would overwrite {path} too, which holds something else",
                "give another name, or move that file away",
            )


def _is_foreign(path: Path) -> bool:
    """Return whether there is a file that we would not have written as statistics."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as stream:
            head = stream.read(99)
    except OSError:
        return True
    return bool(head) and not _OURS.match(head)
