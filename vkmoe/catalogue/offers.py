"""Says which quants of a model a repository has, and which files each of them takes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

from vkmoe.catalogue.caches import MAX_DEPTH, listed, models_among, named, part_names, quant_of
from vkmoe.catalogue.hub import HubFile, Repository
from vkmoe.errors import DownloadError
from vkmoe.models.ahead_file import PATTERNS


class Offer(NamedTuple):
    """Describes a model that can be downloaded."""

    name: str  # "owner/repo"
    quant: str  # in capitals; "" where no file's name says it
    files: tuple[HubFile, ...]  # all parts, in order

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def full_name(self) -> str:
        """Return what users call it."""
        return f"{self.name}:{self.quant}" if self.quant else self.name


def offers_of(repository: Repository, quant: str = "") -> list[Offer]:
    """List what a repository offers, one file for each quant, the smallest first.

    With `quant` that one alone. Raises DownloadError where there is nothing of the kind.
    """
    found = _all_offers(repository)
    if not found:
        there = [file.name for file in repository.files] or repository.others or ["no files"]
        raise DownloadError(
            f"{repository.name} has no model in the GGUF format",
            f"it has {listed(there)}; look for a repository with -GGUF in its name",
        )
    if not quant:
        return sorted(found.values(), key=lambda offer: offer.n_bytes)
    meant = named(quant, found)
    if meant is None:
        quants = listed(sorted(filter(None, found)))
        raise DownloadError(
            f"{repository.name} has no {quant.upper()}",
            f"it has {quants}" if quants else f"leave :{quant} out: it has one model",
        )
    return [found[meant]]


def _all_offers(repository: Repository) -> dict[str, Offer]:
    """Find the models with all their parts, by quants; of several with the same, the first.

    A file without a quant in its name counts where no other has one.
    """
    by_name = {file.name: file for file in repository.files}
    paths = [path for path in map(PurePosixPath, by_name) if len(path.parts) <= MAX_DEPTH]
    found: dict[str, Offer] = {}
    for path in models_among(paths):
        try:
            # One by one, as a name may announce any number of parts.
            parts = tuple(by_name[str(path.with_name(name))] for name in part_names(path))
        except KeyError:
            continue
        found.setdefault(quant_of(path), Offer(repository.name, quant_of(path), parts))
    return {quant: offer for quant, offer in found.items() if quant} or found


def guessers_of(repository: Repository, offer: Offer) -> list[str]:
    """List the files that may guess tokens ahead for a model, which are found beside it."""
    names = [file.name for file in repository.files if file not in offer.files]
    return [x for x in names if any(PurePosixPath(x).match(pattern) for pattern in PATTERNS)]
