"""Answers what Ollama's clients ask about models: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.llm import LLM
from vkmoe.server.api.facts import known_facts
from vkmoe.server.api.shapes import (
    OllamaModelShape,
    OllamaModelsShape,
    OllamaRunningShape,
    VersionShape,
)
from vkmoe.server.errors import ApiError
from vkmoe.server.facts import ModelFacts
from vkmoe.server.fields import Body, read_body
from vkmoe.server.hosting.models import Hosted
from vkmoe.server.hosting.peers import HOP
from vkmoe.server.hosting.roster import TAG, bare_name
from vkmoe.server.openapi import described
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import json_answer

Object = dict[str, Any]
SPOKEN = "0.12.11"  # the version of Ollama whose forms these are: clients refuse older ones
_FOR_EVER = 36525 * 86400.0  # seconds until a model is unloaded that stays
_SHORT = 5  # items of a list that is shown unasked
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
    """List the models, with those of peers, in Ollama's form."""
    state = request.app.state
    found = [each for hosted in state.models.hosted for each in _listed(hosted.service)]
    if state.peers and HOP not in request.headers:
        own = {each["name"] for each in found}
        others = [(_tagged(each["id"]), each.get("meta")) for each in await state.peers.models()]
        found += [
            {**_entry(name, meta if isinstance(meta, dict) else {}), "modified_at": now()}
            for name, meta in others
            if name not in own
        ]
    return json_answer({"models": found})


@described(OllamaRunningShape)
async def running(service: Service, request: HttpRequest) -> Response:
    """List the models that are loaded, in Ollama's form."""
    found = [
        {
            **{name: value for name, value in each.items() if name != "modified_at"},
            **_memory(hosted.service.engine.llm),
            "expires_at": _written(datetime.now(UTC) + _left(hosted)),
        }
        for hosted in request.app.state.models.hosted
        if hosted.is_there
        for each in _listed(hosted.service)
    ]
    return json_answer({"models": found})


@described(OllamaModelShape, body=_ShowFields, statuses=(404, 500, 503))
async def show(service: Service, request: HttpRequest) -> Response:
    """Describe the model by its name, in Ollama's form."""
    asked = await read_body(request, _ShowFields)
    name = asked.model or asked.name
    if not name:
        raise ApiError(400, "model is required", param="model")
    if bare_name(name) not in map(bare_name, _names(service)):
        raise ApiError(404, f"model '{name}' not found", param="model")
    llm, known = service.engine.llm, service.learn_facts()
    try:
        able = await service.off_loop(lambda: capabilities(llm))
    except ApiError:  # a template that cannot be used, as a request that needs it will say
        able = ["completion"]
    is_verbose = bool(asked.verbose)
    file = llm.engine.model.file
    parameters = "\n".join(f"{key:<30} {value}" for key, value in _parameters(service, llm))
    found: Object = {
        "modelfile": f"FROM {known.file_name}\n",
        "parameters": parameters,
        "template": known.template if known.has_template else "",
        "details": _details(known.meta, known),
        "model_info": await service.off_loop(lambda: dict(_metadata(llm, is_verbose)), True),
        "capabilities": able,
        "modified_at": next(_listed(service))["modified_at"],
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
        "tools": family.has_calls,
        "insert": llm.tokenizer.gaps.keys() >= {"fim_pre", "fim_suf", "fim_mid"},
        "thinking": family.has_thoughts,
    }
    return [name for name, is_able in able.items() if is_able]


def _tagged(name: str) -> str:
    """Return a name with the tag that Ollama's clients look for."""
    return name if ":" in name else name + TAG


def _names(service: Service) -> list[str]:
    """List the names of a model."""
    return [*dict.fromkeys(map(_tagged, (service.alias, *service.aliases)))]


def _listed(service: Service) -> Iterator[Object]:
    """Yield what lists say of a model, by each of its names."""
    known = known_facts(service)
    seconds = known.written_at if known and known.written_at else service.started
    written = _written(datetime.fromtimestamp(seconds, UTC))
    for name in _names(service):
        yield {**_entry(name, known.meta if known else {}, known), "modified_at": written}


def _entry(name: str, meta: Mapping[str, Any], known: ModelFacts | None = None) -> Object:
    """Return what a list says of a model; one that is not known well has few figures."""
    digest = known.digest if known else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
    size, details = meta.get("size", 0), _details(meta, known)
    return {"name": name, "model": name, "size": size, "digest": digest, "details": details}


def _details(meta: Mapping[str, Any], known: ModelFacts | None) -> Object:
    family = str(meta.get("architecture", ""))
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(meta.get("n_params") or 0),
        "quantization_level": known.file_type if known else "unknown",
    }


def _memory(llm: LLM) -> Object:
    size = llm.memory
    return {
        "size": sum(size.values()),
        "size_vram": 0 if llm.device_info.is_cpu else size["device"],
        "context_length": llm.engine.ctx_size,
    }


def _left(hosted: Hosted) -> timedelta:
    """Return how long a model stays loaded."""
    return timedelta(seconds=max(min(hosted.seconds_left, _FOR_EVER), 0.0))


def _short(number: int) -> str:
    """Write a number of weights, such as 30.5B."""
    for letter, unit in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)


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
    yield "general.parameter_count", sum(tensor.n_weights for tensor in file.tensors.values())
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
