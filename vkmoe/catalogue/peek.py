"""Reads the headers of a model that a hub has, so that it can be planned before it is downloaded.

What was read is put into files as long as the model's, which are empty but for their headers and
take no more place than these. They can be opened as the model can; their weights are zeros.
"""

from __future__ import annotations

import os
from pathlib import Path

from vkmoe.catalogue.hub import HubFile, Repository, reading
from vkmoe.catalogue.offers import Offer
from vkmoe.errors import DownloadError, ModelFileError
from vkmoe.gguf_file.disk import map_file
from vkmoe.gguf_file.header import GgufPart

_FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 26  # the headers of models with 256 thousand tokens take 16 MiB


def peek(repository: Repository, offer: Offer, folder: Path) -> Path:
    """Read the headers of all parts into files in a folder; return the first.

    Raises DownloadError as `reading` does, ModelFileError for what is no sound GGUF file.
    """
    n_parts = len(offer.files)
    names = ["model.gguf"]
    if n_parts > 1:
        names = [f"model-{n:05d}-of-{n_parts:05d}.gguf" for n in range(1, n_parts + 1)]
    for name, file in zip(names, offer.files, strict=True):
        _read_header(repository, file, folder / name)
    return folder / names[0]


def _read_header(repository: Repository, file: HubFile, path: Path) -> None:
    """Read a file's bytes until they hold its header, as few as the header takes, or twice that."""
    limit = min(file.n_bytes, _MOST_BYTES)
    with path.open("wb") as stream, reading(repository, file, 0, limit) as (_, chunks):
        wanted = _FIRST_BYTES
        for chunk in chunks:
            stream.write(chunk)
            is_last = stream.tell() >= limit
            if stream.tell() >= wanted or is_last:
                stream.flush()
                if _has_header(path, file, is_last):
                    break
                wanted = 2 * stream.tell()
        else:
            raise DownloadError(f"the start of {file.name} broke off", "run the same once more")
    try:
        os.truncate(path, file.n_bytes)
    except OSError as error:
        raise DownloadError(
            f"{path.parent} takes no file of {file.n_bytes} bytes: {error.strerror}",
            "name another folder for such files with TMPDIR",
        ) from None


def _has_header(path: Path, file: HubFile, is_last: bool) -> bool:
    """Say whether a file has the whole header. Raises ModelFileError if the last bytes lack it."""
    try:
        GgufPart(map_file(path), n_bytes=file.n_bytes)
    except ModelFileError as error:
        if is_last:
            what = str(error).removeprefix(f"{path}: ")
            raise ModelFileError(f"{file.name}: {what}", error.hint) from None
        return False
    return True
