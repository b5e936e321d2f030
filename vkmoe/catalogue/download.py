"""Downloads models from a hub into the folder where Hugging Face's clients keep theirs.

Contents lie in blobs/, named by their digests; a snapshot's files are links to them. A transfer
that breaks off, by the network or by Ctrl-C, leaves what came in a file called `.incomplete`, and
the next one goes on from there. The digest of each file is checked. Names in a snapshot are those
that hub.py has checked; a model's files appear there when all of them are whole.

Before that the headers of a model are read into files as long as the model's, which are empty but
for these and take no more place. They are opened and planned as the model would be.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from vkmoe.catalogue.caches import hub_cache, listed
from vkmoe.catalogue.choose import best_offer
from vkmoe.catalogue.hub import (
    REVISION,
    Broken,
    HubFile,
    Repository,
    read_repository,
    reading,
)
from vkmoe.catalogue.offers import Offer, guessers_of, offers_of
from vkmoe.config import EngineConfig
from vkmoe.errors import DownloadError, ModelFileError
from vkmoe.gguf_file.disk import map_file
from vkmoe.gguf_file.header import GgufPart
from vkmoe.models import open_model

if TYPE_CHECKING:
    from vkmoe.weights.placer import Progress

log = logging.getLogger("vkmoe")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each try that follows one without a byte
_CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 18  # of a header
_MOST_HEADER_BYTES = 1 << 26  # those of models with 256 thousand tokens take 16 MiB
_REQUEST_BYTES = 4 << 30  # servers that keep copies for others give no whole files of 50 GB
_GOES_ON = "run the same once more: it goes on from what is there"


def download(name: str, quant: str, config: EngineConfig, progress: Progress | None = None) -> Path:
    """Download a repository's model and return its first file.

    Without a quant it is the one that suits this machine best. `progress(done, total)` is called
    with bytes. Raises DownloadError; before any download, what `open_model` raises for a model that
    vkmoe does not run.
    """
    repository = read_repository(name)
    offers = offers_of(repository, quant)
    offer = _chosen(repository, offers, config)
    fetched = _Fetch(repository, offer, progress or (lambda done, total: None))
    _check_space(fetched, offers)
    size = f"{offer.n_bytes / 1e9:,.1f} GB"
    log.info("downloading %s, %s, to %s", offer.full_name, size, fetched.folder)
    path = fetched.run()
    if guessers := guessers_of(repository, offer):
        tell = "%s would guess tokens ahead for it: `hf download %s NAME` puts one beside the model"
        log.info(tell, listed(guessers), repository.name)
    return path


def _chosen(repository: Repository, offers: list[Offer], config: EngineConfig) -> Offer:
    """Choose an offer that this machine can run, by the headers of some."""
    with TemporaryDirectory(prefix="vkmoe-") as temporary:

        def header_of(offer: Offer) -> Path:
            folder = Path(temporary, str(offers.index(offer)))
            folder.mkdir()
            return _headers(repository, offer, folder)

        if len(offers) > 1:
            return best_offer(offers, config, _existing(hub_cache()), header_of)
        open_model(header_of(offers[0])).close()
        return offers[0]


def _check_space(fetched: _Fetch, offers: list[Offer]) -> None:
    """Raise DownloadError where a disk has too little space for what is still to come."""
    offer, root = fetched.offer, _existing(fetched.folder)
    free, needed = shutil.disk_usage(root).free, fetched.n_missing
    if needed > free:
        fitting = [x.quant for x in offers if x.n_bytes <= free and x.quant]
        smaller = f"name a smaller one ({listed(fitting)}), " if fitting else ""
        raise DownloadError(
            f"{offer.full_name} needs {needed / 1e9:,.1f} GB more, "
            f"and the disk of {root} has {free / 1e9:,.1f} GB free",
            f"free some space, {smaller}or name a folder on another disk with HF_HOME",
        )


def _existing(folder: Path) -> Path:
    """Return the folder, or the first above it that is there."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


# ----- headers -----


def _headers(repository: Repository, offer: Offer, folder: Path) -> Path:
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
    limit = min(file.n_bytes, _MOST_HEADER_BYTES)
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


# ----- files -----


class _Fetch:
    """Brings the files of an offer into the cache."""

    def __init__(self, repository: Repository, offer: Offer, progress: Progress) -> None:
        self.offer = offer
        self._repository, self._progress = repository, progress
        folder = f"models--{offer.name.replace('/', '--')}"
        self.folder = hub_cache() / folder
        self._locks = hub_cache() / ".locks" / folder
        self._n_before = 0  # bytes of the files before the one at hand

    @property
    def n_missing(self) -> int:
        """Count the bytes that are still to come."""
        return sum(self._n_missing_of(file) for file in self.offer.files)

    def run(self) -> Path:
        """Download what is missing, and show the files in a snapshot. Returns the first."""
        try:
            for file in self.offer.files:
                self._bring(file)
                self._n_before += file.n_bytes
            # The first part last: it stands for the model, which is whole then.
            paths = [self._show(file) for file in reversed(self.offer.files)]
            self._write_revision()
        except KeyboardInterrupt:
            log.info("what came is kept; %s", _GOES_ON)
            raise
        except OSError as error:
            raise _disk_error(error, self.folder) from None
        return paths[-1]

    # ----- contents -----

    def _blob(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.digest

    def _n_missing_of(self, file: HubFile) -> int:
        blob = self._blob(file)
        if _size(blob) == file.n_bytes:
            return 0
        return max(0, file.n_bytes - _size(_incomplete(blob)))

    def _bring(self, file: HubFile) -> None:
        """Download a file's content unless it is there. One process at a time does that."""
        blob = self._blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._locks / f"{file.digest}.lock"):
            if _size(blob) != file.n_bytes:
                self._fill(file, _incomplete(blob))
                os.replace(_incomplete(blob), blob)
        self._progress(self._n_before + file.n_bytes, self.offer.n_bytes)

    def _fill(self, file: HubFile, path: Path) -> None:
        """Download into a file from where it ends. Raises DownloadError for a wrong digest."""
        with _opened(path) as stream:
            content = _Content(file, stream, self._show_progress)
            n_tries = 0
            while content.n_bytes < file.n_bytes:
                before = content.n_bytes
                try:
                    self._read_on(content)
                except Broken as error:
                    log.debug("%s broke off after %d bytes: %s", file.name, content.n_bytes, error)
                    n_tries = 0 if content.n_bytes > before else n_tries + 1
                    if n_tries > len(WAITS):
                        raise DownloadError(str(error), _GOES_ON) from None
                    time.sleep(WAITS[max(0, n_tries - 1)])
            stream.flush()
            os.fsync(stream.fileno())
            is_right = content.digest == file.digest
        if not is_right:
            path.unlink()
            raise DownloadError(
                f"{file.name} came with another checksum than the hub has for it",
                "run the same once more; if that does not help, the hub's file is damaged",
            )

    def _read_on(self, content: _Content) -> None:
        """Send one request for what follows, and take what comes."""
        file, start = content.file, content.n_bytes
        end = min(file.n_bytes, start + _REQUEST_BYTES)
        with reading(self._repository, file, start, end) as (begins, chunks):
            if begins < start:
                content.restart()
            for chunk in chunks:
                content.add(chunk)
        if content.n_bytes == start:
            raise Broken(f"the hub sends nothing of {file.name}", _GOES_ON)

    def _show_progress(self, n_bytes: int) -> None:
        self._progress(self._n_before + n_bytes, self.offer.n_bytes)

    # ----- what programs see -----

    def _show(self, file: HubFile) -> Path:
        """Link a snapshot's file to its content. Raises DownloadError for links that lead out."""
        path = self.folder / "snapshots" / self._repository.commit / file.name
        if not path.parent.resolve().is_relative_to(self.folder.resolve()):
            raise DownloadError(
                f"{path.parent} is a link that leads out of the cache", "remove the link"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        blob, link = self._blob(file), _unused(path)
        try:
            link.symlink_to(os.path.relpath(blob, path.parent))
            os.replace(link, path)
        except PermissionError:  # file systems without links
            os.replace(blob, path)
        return path

    def _write_revision(self) -> None:
        path = self.folder / "refs" / REVISION
        path.parent.mkdir(exist_ok=True)
        new = _unused(path)
        new.write_text(self._repository.commit)
        os.replace(new, path)


class _Content:
    """Writes the content of a file from where it ends, and knows its digest."""

    def __init__(self, file: HubFile, stream: IO[bytes], progress: Callable[[int], None]) -> None:
        """Read what is there; a file that is longer than announced begins anew."""
        self.file, self.n_bytes = file, 0
        self._stream, self._progress = stream, progress
        if os.fstat(stream.fileno()).st_size > file.n_bytes:
            stream.truncate(0)
        self._hash = self._new_hash()
        while chunk := stream.read(_CHUNK_BYTES):
            self._count(chunk)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Forget what is there."""
        self._stream.seek(0)
        self._stream.truncate()
        self.n_bytes, self._hash = 0, self._new_hash()

    def add(self, chunk: bytes) -> None:
        """Write what follows. Raises DownloadError for more than was announced."""
        if self.n_bytes + len(chunk) > self.file.n_bytes:
            raise DownloadError(
                f"{self.file.name} is longer than the {self.file.n_bytes} bytes announced", _GOES_ON
            )
        self._stream.write(chunk)
        self._count(chunk)

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.n_bytes += len(chunk)
        self._progress(self.n_bytes)

    def _new_hash(self) -> hashlib._Hash:
        if len(self.file.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.file.n_bytes, usedforsecurity=False)  # as git's


def _incomplete(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _unused(path: Path) -> Path:
    """Return a path beside another, which no other process or thread uses."""
    return path.with_name(uuid4().hex)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading and writing, and make it if need be. A link is refused."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "r+b") as stream:
        yield stream


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from a file's content, those of Hugging Face's clients too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        is_waiting = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_waiting:
                    log.info("another program downloads the same: waiting for it")
                is_waiting = True
                time.sleep(0.2)
        yield


def _disk_error(error: OSError, folder: Path) -> DownloadError:
    """Say what is wrong with a disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(f"the disk of {folder} is full", f"free some space, then {_GOES_ON}")
    reason = error.strerror or str(error)
    return DownloadError(
        f"{error.filename or folder} cannot be written: {reason}",
        "name a folder that can be written to with HF_HOME",
    )
