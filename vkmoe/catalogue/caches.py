"""Lists the model files that programs keep on this machine, each under the name it was fetched by.

Those programs are Hugging Face's clients and llama.cpp, which share a cache, older llama.cpp, LM
Studio and Ollama. Reads folders, names and small manifests; opens no model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_MANIFEST_BYTES = 1 << 20
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
# What a model's file calls its mixture of weight types, as llama.cpp's tools write it.
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)+|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32))(?=[-._]|$)",
    re.IGNORECASE,
)
_BESIDE = ("mmproj", "mtp-")  # files that begin so have a part that goes with a model
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True)
class KeptModel:
    """Describes a model's file, or the first of its parts."""

    name: str  # "owner/repo"; of Ollama's own library "model"
    quant: str  # in capitals, such as "Q4_K_M"; of Ollama the tag; "" where nothing says it
    path: Path
    n_bytes: int  # of all parts
    program: str  # that keeps it


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
    """List the models in a folder and in those within it, by their first parts, in order."""
    paths = [*_entries(folder, "*.gguf"), *_entries(folder, "*/*.gguf")]
    parts = ((path, _PART.search(path.stem)) for path in sorted(paths) if path.is_file())
    firsts = [path for path, part in parts if part is None or int(part[1]) == 1]
    return [path for path in firsts if not path.name.lower().startswith(_BESIDE)]


def quant_of(path: Path) -> str:
    """Read the mixture of weight types in a file's name, in capitals; "" where it has none."""
    found = _QUANT.findall(_PART.sub("", path.stem))
    return found[-1].upper() if found else ""


def n_bytes_of(first: Path) -> int:
    """Count the bytes of a model in one part or several, as far as they are there."""
    part = _PART.search(first.stem)
    if part is None:
        return first.stat().st_size
    stem = first.stem[: part.start()]
    return sum(path.stat().st_size for path in first.parent.glob(f"{stem}-*-of-{part[2]}.gguf"))


# ----- programs -----


def _root(variables: Mapping[str, str], default: str) -> Path:
    """Find a cache: below the folder that the first variable set names, else below the home."""
    found = (Path(os.environ[x], below) for x, below in variables.items() if os.environ.get(x))
    return next(found, Path.home() / default)


def _of_hugging_face() -> Iterator[KeptModel]:
    """Yield what Hugging Face's clients keep: models--OWNER--REPO/snapshots/REVISION/FILE.

    Of a file that several revisions have, that of the newest.
    """
    variables = {"LLAMA_CACHE": "", "HF_HUB_CACHE": "", "HF_HOME": "hub"}
    root = _root(variables | {"XDG_CACHE_HOME": "huggingface/hub"}, ".cache/huggingface/hub")
    for folder in _entries(root, "models--*--*"):
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
    for owner, repo in sorted({(owner, repo) for owner, repo in names}):
        files = [path for path in models_in(root) if path.name.startswith(f"{owner}_{repo}_")]
        yield from _named(f"{owner}/{repo}", files, "llama.cpp")


def _of_lm_studio() -> Iterator[KeptModel]:
    """Yield what LM Studio keeps: OWNER/REPO/FILE."""
    for root in (Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"):
        for folder in _entries(root, "*/*"):
            name = f"{folder.parent.name}/{folder.name}"
            yield from _named(name, models_in(folder), "LM Studio")


def _of_ollama() -> Iterator[KeptModel]:
    """Yield what Ollama keeps: manifests/REGISTRY/OWNER/MODEL/TAG name blobs by their digests."""
    root = _root({"OLLAMA_MODELS": ""}, ".ollama/models")
    for path in _entries(root / "manifests", "*/*/*/*"):
        owner, model, tag = path.parts[-3:]
        blob = _ollama_blob(root, path)
        if blob is not None:
            name = model if owner == "library" else f"{owner}/{model}"
            yield KeptModel(name, tag.upper(), blob, blob.stat().st_size, "Ollama")


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    """Return the model's file that a manifest names; None where it names none that is there."""
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [x["digest"] for x in layers if x["mediaType"].endswith("image.model")]
        digest = _DIGEST.fullmatch(digests[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    blob = root / "blobs" / f"sha256-{digest[1]}" if digest else None
    return blob if blob is not None and blob.is_file() else None


def _entries(folder: Path, pattern: str) -> list[Path]:
    """List what is in a folder, in order; nothing where it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _named(name: str, paths: list[Path], program: str) -> Iterator[KeptModel]:
    for path in paths:
        yield KeptModel(name, quant_of(path), path, n_bytes_of(path), program)
