"""Keeps the files a run leaves behind, and refuses to write over what is needed.

Owns when `--expert-stats` and `--expert-profile` are read and written, which paths may be replaced,
and what happens when that fails. Does not own what stands in the files (report.py, profile.py).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import BinaryIO

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.decide.token_table import History
from vkmoe.experts.records.profile import (
    is_read_only,
    load_profile,
    profile_text,
    profiled_model,
)
from vkmoe.experts.records.report import FORMAT, ExpertReport, as_document, as_text
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo

log = logging.getLogger("vkmoe")
STATS, PROFILE = "--expert-stats", "--expert-profile"
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")  # what a plain file is called that is open already


class RecordKeeper:
    """Reads the profile before the model is loaded, and writes both files at the end.

    `seed` is what the profile holds; None without one, and for a dense model.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, expert_layers: Sequence[Sequence[TensorInfo]]
    ) -> None:
        """Check the paths and read the profile; `expert_layers` are empty for a dense model.

        Raises UsageError for paths that would destroy something, VkmoeError for a profile that is
        damaged or of another model. A path that cannot be written is a warning in the log.
        """
        self._outputs = record_outputs(config)
        self.seed: History | None = None
        check_outputs(self._outputs)
        _refuse_foreign(self._outputs)
        profile = config.expert_profile
        if profile is not None and not expert_layers:
            log.warning("the model has no experts: the expert profile %s is not used", profile)
            self._outputs = [each for each in self._outputs if each[0] != PROFILE]
            profile = None
        if profile is not None:
            tensors = [tensor for layer in expert_layers for tensor in layer]
            self._model = profiled_model(spec, len(expert_layers), tensors)
            self.seed = load_profile(Path(profile), self._model, spec.n_vocab)
            if self.seed is not None and self.seed.counts.any():
                log.info("expert profile %s: the most used experts come first", profile)
        firsts = {option: path for option, path in reversed(self._outputs)}
        for what, option in (("statistics", STATS), ("profile", PROFILE)):
            if option in firsts and (reason := reason_against_writing(firsts[option])):
                log.warning("the expert %s will not be written at the end: %s", what, reason)

    def write(self, report: ExpertReport, history: History) -> None:
        """Write the statistics, and what the run leaves; one that fails stops no other.

        A run without a token replaces no statistics, and neither begins nor changes a profile.
        Raises VkmoeError naming what failed; while another exception is being handled, that is
        logged instead.
        """
        failures = []
        for option, path in self._outputs:
            if not report.n_tokens and (option == PROFILE or path.is_file()):
                continue
            if option == PROFILE:
                what, text = "profile", profile_text(self._model, history)
            else:
                what = "statistics"
                text = as_text(report)
                if path.suffix == ".json":
                    text = json.dumps(as_document(report), indent=1, allow_nan=False) + "\n"
            try:
                write_whole(path, text)
                log.info("wrote the expert %s to %s", what, path)
            except OSError as error:
                reason = error.strerror or error
                failures.append(f"the expert {what} could not be written to {path}: {reason}")
        if sys.exc_info()[1] is not None:
            for failure in failures:
                log.error(failure)
        elif failures:
            hint = "give a path in a folder that exists and where you may write"
            raise VkmoeError("; ".join(failures), hint)


def record_outputs(config: EngineConfig) -> list[tuple[str, Path]]:
    """Return the option and path of every file that the records of a run are written to.

    Those of one option begin with the path that was asked for. `stats.txt` and `stats.json` belong
    together; to any other name of the text, .json is appended. A pipe has nothing beside it.
    An importance file or a trace is read as a profile, but not written.
    """
    outputs = []
    if config.expert_stats is not None:
        path = Path(config.expert_stats)
        other = {".json": ".txt", ".txt": ".json"}.get(path.suffix)
        beside = path.with_suffix(other) if other else Path(f"{path}.json")
        outputs += [(STATS, each) for each in (path, beside)[: 1 if _is_stream(path) else 2]]
    profile = config.expert_profile
    if profile is not None and not is_read_only(Path(profile)):
        outputs.append((PROFILE, Path(profile)))
    return outputs


def _refuse_foreign(outputs: Sequence[tuple[str, Path]]) -> None:
    """Refuse statistics whose second file would replace one that holds something else."""
    paths = [path for option, path in outputs if option == STATS]
    for path in paths[1:]:
        head = _head(path)
        if head and FORMAT.encode() not in head:
            raise UsageError(
                f"{STATS} {paths[0]} would overwrite {path} too, which holds something else",
                "give another name, or move that file away",
            )


# ----- any file -----


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file beside `path` and put it in its place. Raises OSError.

    A pipe, a device or an open stream is added to instead: a new file in its place would not reach
    its reader.
    """
    data = text.encode("utf-8", "replace")
    if _is_stream(path):
        with path.open("ab") as stream:
            stream.write(data)
        return
    with new_file(path) as stream:
        stream.write(data)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its place at the end, unless that is an error.

    A link stays a link, a file keeps its permissions. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    beside = target.parent / f".{target.name[:40]}.{os.getpid()}"
    try:
        with beside.open("wb") as stream:
            yield stream
        if target.is_file():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def reason_against_writing(path: Path) -> str | None:
    """Return why `write_whole` would fail, as far as one can know before; None: it may work."""
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        return f"{path} is a folder"
    if not os.path.isdir(folder):
        return f"no folder {folder}"
    if not os.access(folder, os.W_OK | os.X_OK) and not _is_stream(path):
        return f"no permission to write in {folder}"
    return None


def check_outputs(outputs: Sequence[tuple[str, Path]], inputs: Iterable[str | Path] = ()) -> None:
    """Raise UsageError where files to write would replace a model, one of `inputs` or each other.

    `outputs` are options and the files they ask for. Links are followed. Any file that begins as
    GGUF is a model, in use or not; so is any name that ends in .gguf.
    """
    for option, path in outputs:
        if path.suffix.lower() == ".gguf":
            raise UsageError(f"{option} {path} has the name of a model", "give it another name")
        for source in inputs:
            if os.path.isfile(path) and os.path.realpath(path) == os.path.realpath(source):
                raise UsageError(
                    f"{option} {path} would overwrite {source}, which is read", "give another path"
                )
        if _head(path).startswith(b"GGUF"):  # models of ollama and of Hugging Face have no ending
            raise UsageError(f"{option} {path} would overwrite a model", "give another path")
    for (option, path), (other, second) in combinations(outputs, 2):
        same = os.path.realpath(path) == os.path.realpath(second) and not _is_stream(path)
        if option != other and same:
            raise UsageError(
                f"{option} and {other} would both write {path}", "give one of them another name"
            )


def _head(path: Path) -> bytes:
    """Return how a plain file begins; nothing where there is none."""
    if not os.path.isfile(path):
        return b""
    try:
        with path.open("rb") as stream:
            return stream.read(99)
    except OSError:
        return b"?"  # something, whatever it is


def _is_stream(path: Path) -> bool:
    """Say whether `path` is a pipe, a terminal, a device, or the open file of a process."""
    is_plain = os.path.isfile(path) or os.path.isdir(path)
    return str(path).startswith(_STREAMS) or (os.path.exists(path) and not is_plain)
