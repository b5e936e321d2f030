"""Answers what a client may ask about the server and its model, and the uses of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe import __version__
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.server.api.chat import ChatFields
from vkmoe.server.api.shapes import (
    HealthShape,
    ModelShape,
    ModelsShape,
    PromptShape,
    SlotShape,
    TextShape,
    TokensShape,
)
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Tokens, read_body
from vkmoe.server.openapi import described
from vkmoe.server.service import LONG_TEXT, Service
from vkmoe.server.sse import json_answer


class _Text(Body):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class _Tokens(Body):
    tokens: Tokens


@described(HealthShape)
async def health(service: Service, request: HttpRequest) -> Response:
    """Say whether the model is there."""
    _ = service.engine.llm
    return json_answer({"status": "ok"})


def _model(service: Service) -> dict[str, Any]:
    model = {"id": service.alias, "object": "model", "created": service.started}
    llm = service.engine.llm
    tensors = llm.engine.model.file.tensors.values()
    meta = {
        "n_vocab": llm.spec.n_vocab,
        "n_ctx": llm.engine.ctx_size,
        "n_ctx_train": llm.spec.context_length,
        "n_embd": llm.spec.width,
        "n_params": sum(tensor.n_weights for tensor in tensors),
        "size": sum(tensor.n_bytes for tensor in tensors),
        "architecture": llm.spec.architecture,
    }
    names = {"aliases": service.settings.aliases, "tags": service.settings.all_tags}
    return {**model, "owned_by": "vkmoe", **names, "meta": meta}


@described(ModelsShape)
async def models(service: Service, request: HttpRequest) -> Response:
    """List the one model."""
    return json_answer({"object": "list", "data": [_model(service)]})


@described(ModelShape, statuses=(404, 503))
async def one_model(service: Service, request: HttpRequest) -> Response:
    """Describe the model by its name."""
    name = request.path_params["name"]
    if name not in (service.alias, *service.settings.aliases):
        raise ApiError(404, f"there is no model {name!r}; it is {service.alias!r}", param="model")
    return json_answer(_model(service))


@described(TokensShape, body=_Text)
async def tokenize(service: Service, request: HttpRequest) -> Response:
    """Turn a text into token ids."""
    asked, llm = await read_body(request, _Text), service.engine.llm
    tokenizer = llm.tokenizer
    service.check_length(llm, asked.content)

    def tokens() -> list[int] | list[dict[str, Any]]:
        ids = tokenizer.encode(asked.content, asked.add_special, asked.parse_special)
        if not asked.with_pieces:
            return ids
        pieces = [tokenizer.token_bytes(each, after_special=False) for each in ids]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        return [{"id": i, "piece": text} for i, text in zip(ids, texts, strict=True)]

    is_long = len(asked.content) > LONG_TEXT
    return json_answer({"tokens": await service.off_loop(tokens, is_long)})


@described(TextShape, body=_Tokens)
async def detokenize(service: Service, request: HttpRequest) -> Response:
    """Turn token ids into a text."""
    asked, tokenizer = await read_body(request, _Tokens), service.engine.llm.tokenizer
    if bad := [each for each in asked.tokens if not 0 <= each < tokenizer.n_vocab]:
        raise ApiError(400, f"token id {bad[0]} is not one of {tokenizer.n_vocab}", param="tokens")
    is_long = len(asked.tokens) > LONG_TEXT
    text = await service.off_loop(lambda: tokenizer.decode(asked.tokens), is_long)
    return json_answer({"content": text})


@described(PromptShape, body=ChatFields)
async def apply_template(service: Service, request: HttpRequest) -> Response:
    """Write a conversation as the prompt that it becomes."""
    asked, llm = await read_body(request, ChatFields), service.engine.llm
    conversation = asked.conversation(bool(service.settings.prefill_assistant))
    prompt = await service.off_loop(lambda: service.prompt(llm, conversation))
    return json_answer({"prompt": prompt.text})


@described(dict[str, Any])
async def props(service: Service, request: HttpRequest) -> Response:
    """Describe the server, as llama-server does."""
    llm, given, names = service.engine.llm, vars(service.sampling), {"temp": "temperature"}
    most = service.settings.max_tokens
    try:
        template = await service.off_loop(lambda: llm.chat_format.template.source)
    except ApiError:  # one that cannot be used, as a request that needs it will say
        template = ""
    return json_answer(
        {
            "default_generation_settings": {
                "n_ctx": llm.engine.ctx_size,
                "params": {names.get(name, name): value for name, value in given.items()}
                | {"n_predict": most, "max_tokens": most},
            },
            "total_slots": llm.engine.n_regions,
            "model_alias": service.alias,
            "model_path": Path(llm.engine.model.file.path).name,  # where it lies stays here
            "modalities": {"vision": False, "video": False, "audio": False},
            "chat_template": template,
            "has_chat_template": llm.has_chat_template,
            "bos_token": _token(llm.tokenizer, llm.tokenizer.bos_id),
            "eos_token": _token(llm.tokenizer, llm.tokenizer.eos_id),
            "build_info": f"vkmoe {__version__}",
            "device": llm.device_info.name,
        }
    )


@described(list[SlotShape], statuses=(501, 503))
async def slots(service: Service, request: HttpRequest) -> Response:
    """List the sequences that the KV caches hold, and what runs in them."""
    if not service.settings.slots:
        raise ApiError(501, "this server does not say what runs: start it without --no-slots")
    llm = service.engine.llm
    running = dict(llm.scheduler.running)
    found = []
    for region in range(llm.engine.n_regions):
        slot = {"id": region, "n_ctx": llm.engine.ctx_size, "is_processing": region in running}
        if (reply := running.get(region)) is not None:
            slot |= {
                "n_prompt_tokens": reply.n_prompt,
                "n_prompt_tokens_processed": reply.n_read,
                "n_prompt_tokens_cache": reply.n_reused,
                "n_decoded": reply.n_generated,
            }
        found.append(slot)
    return json_answer(found)


@described(str, media_types=("text/plain",), statuses=(501,))
async def metrics(service: Service, request: HttpRequest) -> Response:
    """Write the counts for Prometheus."""
    if not service.settings.metrics:
        raise ApiError(501, "this server shows no counts: start it without --no-metrics")
    started = {"Process-Start-Time-Unix": str(service.started)}
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(service.metrics.text(), headers=started, media_type=kind)


@described(list[dict[str, Any]], statuses=())
async def lora_adapters(service: Service, request: HttpRequest) -> Response:
    """List the adapters, of which there are none."""
    return json_answer([])


def _token(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
