"""Answers what Ollama's clients ask about models: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.gguf_file import GgufFile
from vkmoe.llm import LLM
from vkmoe.server.api.shapes import (
    OllamaModelShape,
    OllamaModelsShape,
    OllamaRunningShape,
    VersionShape,
)
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, read_body
from vkmoe.server.openapi import described
from vkmoe.server.service import Service
from vkmoe.server.sse import json_answer

Object = dict[str, Any]
SPOKEN = "0.12.11"  # the version of Ollama whose forms these are: clients refuse older ones
_TAG = ":latest"  # of a name that has none
_FOR_EVER = timedelta(days=36525)  # until a model is unloaded that stays
_SHORT = 5  # items of a list that is shown unasked
_BLOB = re.compile(r"sha256-([0-9a-f]{64})")  # how Ollama names the files of its models
_FILE_TYPES = {  # general.file_type
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"},
    **{10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M"},
    **{16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S"},
    **{22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M"},
    **{28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0"},
    **{37: "TQ2_0", 38: "MXFP4_MOE"},
}
# Ollama's names of options, and vkmoe's.
_PARAMETERS = {
    "temperature": "temp",
    **{name: name for name in ("top_k", "top_p", "min_p", "typical_p", "seed")},
    **{name: name for name in ("repeat_penalty", "repeat_last_n")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
}


class _ShowFields(Body):
    model: str | None = None
    name: str | None = None  # of older clients
    verbose: bool | None = None


@described(VersionShape, statuses=())
async def version(service: Service, request: HttpRequest) -> Response:
    """Say which version of Ollama has these forms."""
    return json_answer({"version": SPOKEN})


@described(OllamaModelsShape)
async def tags(service: Service, request: HttpRequest) -> Response:
    """List the models, in Ollama's form; of those that were never loaded little is known."""
    found: list[Object] = []
    for hosted in request.app.state.models.hosted:
        each, listed = hosted.service, _unknown(hosted.service)
        if not each.engine.must_be_waited_for:
            llm = each.engine.llm
            listed = _KNOWN[each] = _known(llm) | {"modified_at": _modified(each, llm)}
        listed = _KNOWN.get(each, listed)
        found += [{"name": name, "model": name, **listed} for name in _names(each)]
    return json_answer({"models": found})


@described(OllamaRunningShape)
async def running(service: Service, request: HttpRequest) -> Response:
    """List the models that are loaded, in Ollama's form."""
    found: list[Object] = []
    for hosted in request.app.state.models.hosted:
        each = hosted.service
        if each.engine.state != "ready":
            continue
        llm = each.engine.llm
        memory = llm.memory
        more = {
            "size": sum(memory.values()),
            "size_vram": 0 if llm.device_info.is_cpu else memory["device"],
            "expires_at": _written(datetime.now(UTC) + _FOR_EVER),
            "context_length": llm.engine.ctx_size,
        }
        found += [{"name": name, "model": name, **_known(llm), **more} for name in _names(each)]
    return json_answer({"models": found})


@described(OllamaModelShape, body=_ShowFields, statuses=(404, 500, 503))
async def show(service: Service, request: HttpRequest) -> Response:
    """Describe the model by its name, in Ollama's form."""
    asked = await read_body(request, _ShowFields)
    name = asked.model or asked.name
    if not name:
        raise ApiError(400, "model is required", param="model")
    if name.removesuffix(_TAG) not in {each.removesuffix(_TAG) for each in _names(service)}:
        raise ApiError(404, f"model '{name}' not found", param="model")
    llm = service.engine.llm
    try:
        able = await service.off_loop(lambda: capabilities(llm))
        template = llm.chat_template.source if llm.has_chat_template else ""
    except ApiError:  # a template that cannot be used, as a request that needs it will say
        able, template = ["completion"], ""
    is_verbose = bool(asked.verbose)
    file = llm.engine.model.file
    parameters = "\n".join(f"{key:<30} {value}" for key, value in _parameters(service, llm))
    found: Object = {
        "modelfile": f"FROM {Path(file.path).name}\n",  # where it lies stays here
        "parameters": parameters,
        "template": template,
        "details": _details(llm),
        "model_info": await service.off_loop(lambda: dict(_metadata(llm, is_verbose)), True),
        "capabilities": able,
        "modified_at": _modified(service, llm),
    }
    if text := file.metadata.get("general.license"):
        found["license"] = str(text)
    if is_verbose:
        found["tensors"] = [
            {"name": each.name, "type": each.type, "shape": list(each.shape[::-1])}
            for each in file.tensors.values()
        ]
    return json_answer(found)


def capabilities(llm: LLM) -> list[str]:
    """List what a model can do, by Ollama's words. Raises VkmoeError."""
    family = llm.chat_format.family
    able = {
        "completion": True,
        "tools": family.name != "none",
        "insert": {"fim_pre", "fim_suf", "fim_mid"} <= llm.tokenizer.gaps.keys(),
        "thinking": family.thought is not None or family.name == "harmony",
    }
    return [name for name, is_able in able.items() if is_able]


def _names(service: Service) -> list[str]:
    """List the names of the model; Ollama's clients look for tags in them."""
    names = dict.fromkeys((service.alias, *service.settings.aliases))
    return [name if ":" in name else name + _TAG for name in names]


# What is known of models that sleep.
_KNOWN: WeakKeyDictionary[Service, Object] = WeakKeyDictionary()


def _known(llm: LLM) -> Object:
    """Return what lists say of a model that is loaded."""
    file = llm.engine.model.file
    size = sum(tensor.n_bytes for tensor in file.tensors.values())
    return {"size": size, "digest": _digest(file), "details": _details(llm)}


def _unknown(service: Service) -> Object:
    """Return what lists say of a model that was never loaded."""
    details = {"parent_model": "", "format": "gguf", "family": "", "families": []}
    return {
        "size": 0,
        "digest": hashlib.sha256(service.alias.encode("utf-8", "replace")).hexdigest(),
        "details": details | {"parameter_size": "", "quantization_level": "unknown"},
        "modified_at": _written(datetime.fromtimestamp(service.started, UTC)),
    }


def _details(llm: LLM) -> Object:
    file, family = llm.engine.model.file, llm.spec.architecture
    kind = file.metadata.get("general.file_type")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _short(_n_weights(file)),
        "quantization_level": _FILE_TYPES.get(kind, "unknown")
        if isinstance(kind, int)
        else "unknown",
    }


def _n_weights(file: GgufFile) -> int:
    return sum(tensor.n_weights for tensor in file.tensors.values())


def _short(number: int) -> str:
    """Write a number of weights, such as 30.5B."""
    for letter, unit in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)


def _digest(file: GgufFile) -> str:
    """Return what tells a model from others: of Ollama's own files their digest.

    Of other files it is that of their tensors' names, types and shapes: all their bytes would take
    minutes to read.
    """
    if named := _BLOB.fullmatch(Path(file.path).name):
        return named[1]
    head = [file.metadata.get("general.name"), *(each[:3] for each in file.tensors.values())]
    return hashlib.sha256(repr(head).encode("utf-8", "replace")).hexdigest()


def _modified(service: Service, llm: LLM) -> str:
    """Return when the file was written, or when the server began if the file is gone."""
    try:
        seconds = Path(llm.engine.model.file.paths[0]).stat().st_mtime
    except OSError:
        seconds = service.started
    return _written(datetime.fromtimestamp(seconds, UTC))


def _written(when: datetime) -> str:
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def now() -> str:
    """Return the time as RFC 3339 writes it."""
    return _written(datetime.now(UTC))


def _parameters(service: Service, llm: LLM) -> Iterator[tuple[str, Any]]:
    """Yield the options that a reply has where its request names none."""
    yield "num_ctx", llm.engine.ctx_size
    yield "num_predict", service.settings.max_tokens
    for name, own in _PARAMETERS.items():
        if (value := getattr(service.sampling, own)) is not None:
            yield name, value


def _metadata(llm: LLM, is_verbose: bool) -> Iterator[tuple[str, Any]]:
    """Yield the metadata of a model; long lists are null unless all is asked for."""
    file = llm.engine.model.file
    yield "general.parameter_count", _n_weights(file)
    for key in file.metadata:
        if key == "tokenizer.chat_template":  # which has a place of its own
            continue
        value: Any = file.metadata[key]
        if isinstance(value, np.ndarray):
            value = value.tolist()
        is_long = isinstance(value, list) and len(value) > _SHORT
        yield key, None if is_long and not is_verbose else _plain(value)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: null for numbers that are none."""
    if isinstance(value, list | np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
