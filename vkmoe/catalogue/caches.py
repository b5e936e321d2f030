"""Lists the model files that programs keep on this machine, each under the name it was fetched by.

Those programs are Hugging Face's clients and llama.cpp, which share a cache, older llama.cpp, LM
Studio and Ollama. Reads folders, names and small manifests; opens no model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

MAX_JSON_BYTES = 1 << 20
MAX_DEPTH = 3  # of folders that a model's file is looked for in, one within the other
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
# What a model's file calls its mixture of weight types, as llama.cpp's tools write it.
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)+|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|F32))(?=[-._]|$)",
    re.IGNORECASE,
)
# Files that go with a model: what it sees with, and what guesses its tokens ahead.
_BESIDE = re.compile(r"(?:^|[-._])mmproj|^mtp-", re.IGNORECASE)
_MAYBE_BESIDE = ("imatrix", "assistant")  # in such names too, but models may be called so
# Where Ollama keeps models if the system runs it as a service, on Linux.
OLLAMA_OF_SYSTEM = Path("/usr/share/ollama/.ollama/models")
_MOST_LISTED = 12  # names in an error
Name = TypeVar("Name", bound=PurePath)
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True)
class KeptModel:
    """Describes a model's file, or the first of its parts."""

    name: str  # "owner/repo"; of Ollama's own library "model"
    quant: str  # in capitals, such as "Q4_K_M"; of Ollama the tag; "" where nothing says it
    path: Path
    n_bytes: int  # of all parts
    program: str  # that keeps it

    @property
    def full_name(self) -> str:
        """Return what users call it: the name, and the quant where there is one."""
        return f"{self.name}:{self.quant}" if self.quant else self.name


def kept_models() -> Iterator[KeptModel]:
    """Yield the models of all caches, each file once."""
    found = set()
    for models in (_of_hugging_face(), _of_llama_cpp(), _of_lm_studio(), _of_ollama()):
        for model in models:
            real = model.path.resolve()
            if real not in found:
                found.add(real)
                yield model


def models_in(folder: Path) -> list[Path]:
    """List the models in a folder and those within it, by their first parts, in order."""
    paths = [
        path for depth in range(MAX_DEPTH) for path in _entries(folder, "*/" * depth + "*.gguf")
    ]
    return models_among(path for path in sorted(paths) if os.path.isfile(path))


def models_among(files: Iterable[Name]) -> list[Name]:
    """Leave of some files those that are models, or the first parts of some, by their names."""
    parts = ((path, _PART.search(path.stem)) for path in files)
    firsts = [path for path, part in parts if part is None or int(part[1]) == 1]
    models = [path for path in firsts if not _BESIDE.search(path.name)]
    sure = [x for x in models if not any(word in x.name.lower() for word in _MAYBE_BESIDE)]
    return sure or models


def quant_of(path: PurePath) -> str:
    """Read the mixture of weight types in a file's name, in capitals; "" where it has none."""
    found = _QUANT.findall(bare_stem(path))
    return found[-1].upper() if found else ""


def bare_stem(path: PurePath) -> str:
    """Return a file's name without its suffix, and without the number of a part."""
    return _PART.sub("", path.stem)


def part_names(first: PurePath) -> Iterator[str]:
    """Yield the names of all parts of a model, by that of the first; of one part it is the same."""
    part = _PART.search(first.stem)
    if part is None:
        yield first.name
        return
    for n in range(1, max(1, int(part[2])) + 1):
        yield f"{bare_stem(first)}-{n:05d}-of-{part[2]}{first.suffix}"


def is_whole(first: Path) -> bool:
    """Say whether all parts of a model are there."""
    return all(os.path.isfile(first.with_name(name)) for name in part_names(first))


def named(quant: str, among: Collection[str]) -> str | None:
    """Return the quant that a user names, in any case; None: it is not there.

    Without a quant of that name, the one that Unsloth made of it is meant: UD-Q4_K_XL by Q4_K_XL.
    """
    names = (quant.upper(), f"UD-{quant.upper()}")
    return next((name for name in names if name in among), None)


def listed(names: Sequence[str]) -> str:
    """Join names that others chose, escaped where they are not printable, a long list in part."""
    more = len(names) - _MOST_LISTED
    shown = [x[:80] if x.isprintable() else ascii(x)[1:-1][:80] for x in names[:_MOST_LISTED]]
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


# ----- programs -----


def _home() -> Path:
    """Find the user's home; where nothing says it, what is below it is not there."""
    return Path(os.path.expanduser("~"))


def _root(variables: Mapping[str, str], default: str) -> Path:
    """Find a cache: below the folder that the first variable set names, else below the home."""
    found = (Path(os.environ[x], below) for x, below in variables.items() if os.environ.get(x))
    return next(found, _home() / default)


def hub_cache() -> Path:
    """Find the folder that Hugging Face's clients keep models in."""
    variables = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "hub"}
    root = _root(variables | {"XDG_CACHE_HOME": "huggingface/hub"}, ".cache/huggingface/hub")
    return Path(os.path.expanduser(os.path.expandvars(root)))


def _of_hugging_face() -> Iterator[KeptModel]:
    """Yield what Hugging Face's clients keep: models--OWNER--REPO/snapshots/REVISION/FILE.

    Of a file that several revisions have, that of the newest. llama.cpp may have such a folder of
    its own.
    """
    roots = [hub_cache()]
    if os.environ.get("LLAMA_CACHE"):
        roots.insert(0, Path(os.environ["LLAMA_CACHE"]))
    for folder in (folder for root in roots for folder in _entries(root, "models--*--*")):
        newest: dict[Path, Path] = {}  # by the path within a snapshot
        for snapshot in sorted(_entries(folder / "snapshots", "*"), key=_changed_at):
            newest |= {path.relative_to(snapshot): path for path in models_in(snapshot)}
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        yield from _named(name, sorted(newest.values()), "Hugging Face")


def _changed_at(path: Path) -> float:
    return path.lstat().st_mtime


def _of_llama_cpp() -> Iterator[KeptModel]:
    """Yield what llama.cpp kept before it shared that cache: OWNER_REPO_FILE beside manifests."""
    root = _root({"LLAMA_CACHE": "", "XDG_CACHE_HOME": "llama.cpp"}, ".cache/llama.cpp")
    names = [path.name.split("=")[1:3] for path in _entries(root, "manifest=*=*=*.json")]
    models = models_in(root)
    for owner, repo in sorted({(owner, repo) for owner, repo in names}):
        files = [path for path in models if path.name.startswith(f"{owner}_{repo}_")]
        yield from _named(f"{owner}/{repo}", files, "llama.cpp")


def _of_lm_studio() -> Iterator[KeptModel]:
    """Yield what LM Studio keeps: OWNER/REPO/FILE, in folders of its own or one that was chosen."""
    home = _home()
    roots = [home / ".lmstudio/models", home / ".cache/lm-studio/models"]
    settings = _json_in(home / ".lmstudio/settings.json")
    chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
    if isinstance(chosen, str) and os.path.isabs(chosen):
        roots.insert(0, Path(chosen))
    for folder in (folder for root in roots for folder in _entries(root, "*/*")):
        name = f"{folder.parent.name}/{folder.name}"
        yield from _named(name, models_in(folder), "LM Studio")


def _of_ollama() -> Iterator[KeptModel]:
    """Yield what Ollama keeps: manifests/REGISTRY/OWNER/MODEL/TAG name blobs by their digests."""
    roots = [_root({"OLLAMA_MODELS": ""}, ".ollama/models"), OLLAMA_OF_SYSTEM]
    for root in roots:
        for path in _entries(root / "manifests", "*/*/*/*"):
            owner, model, tag = path.parts[-3:]
            blob = _ollama_blob(root, path)
            if blob is not None:
                name = model if owner == "library" else f"{owner}/{model}"
                yield KeptModel(name, tag.upper(), blob, blob.stat().st_size, "Ollama")


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    """Return the model's file that a manifest names; None where it names none that is there."""
    try:
        layers = _json_in(manifest)["layers"]
        digests = [x["digest"] for x in layers if x["mediaType"].endswith("image.model")]
        digest = _DIGEST.fullmatch(digests[0])
    except (LookupError, TypeError, AttributeError):
        return None
    blob = root / "blobs" / f"sha256-{digest[1]}" if digest else None
    return blob if blob is not None and os.path.isfile(blob) else None


def _json_in(path: Path) -> Any:
    """Return what a small file says; None for one that cannot be read."""
    try:
        return json.loads(path.read_bytes()) if path.stat().st_size <= MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _entries(folder: Path, pattern: str) -> list[Path]:
    """List what is in a folder, in order; nothing where it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _named(name: str, paths: list[Path], program: str) -> Iterator[KeptModel]:
    for path in paths:
        parts = (path.with_name(part) for part in part_names(path))
        n_bytes = sum(part.stat().st_size for part in parts if os.path.isfile(part))
        yield KeptModel(name, quant_of(path), path, n_bytes, program)
