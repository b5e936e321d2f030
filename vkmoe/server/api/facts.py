"""Answers what a client may ask about the server and its model, and the uses of its tokenizer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Self

from pydantic import model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe import __version__
from vkmoe.errors import UnavailableError
from vkmoe.server.api.chat import ChatFields
from vkmoe.server.api.shapes import (
    HealthShape,
    ModelShape,
    ModelsShape,
    PromptShape,
    SlotShape,
    TextShape,
    TokenizerShape,
    TokensShape,
)
from vkmoe.server.errors import ApiError, unknown_model
from vkmoe.server.facts import ModelFacts
from vkmoe.server.fields import Body, Tokens, read_body
from vkmoe.server.hosting.peers import HOP
from vkmoe.server.openapi import described
from vkmoe.server.service import LONG_TEXT, Service
from vkmoe.server.transport.sse import json_answer


class _Text(Body):
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None  # vLLM's name for it
    add_special_tokens: bool = True  # to a `prompt`

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.content is None) == (self.prompt is None):
            raise ValueError("either content or prompt is needed")
        return self


class _Tokens(Body):
    tokens: Tokens


@described(HealthShape)
async def health(service: Service, request: HttpRequest) -> Response:
    """Say whether the model is there, or will be when a request needs it."""
    if not service.engine.must_be_waited_for:
        _ = service.engine.llm
    return json_answer({"status": "ok"})


def known_facts(service: Service) -> ModelFacts | None:
    """Return what there is to say of a model; None for one that was never loaded.

    Raises UnavailableError for one that is not there, and will not be when a request needs it.
    """
    try:
        return service.learn_facts()
    except UnavailableError:
        if not service.engine.must_be_waited_for:
            raise
        return None


def _model(service: Service) -> dict[str, Any]:
    """Describe a model, for clients of OpenAI and of Anthropic; one never loaded has no figures."""
    state, known = service.engine.state, known_facts(service)
    return {
        "id": service.alias,
        "object": "model",
        "created": service.started,
        "owned_by": "vkmoe",
        "type": "model",
        "display_name": service.alias,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
        "aliases": service.aliases,
        "tags": service.settings.all_tags,
        "status": {"value": {"ready": "loaded", "asleep": "unloaded"}.get(state, state)},
        "meta": known.meta if known else None,
    }


@described(ModelsShape)
async def models(service: Service, request: HttpRequest) -> Response:
    """List the models, with those of peers."""
    state = request.app.state
    found = [_model(each.service) for each in state.models.hosted]
    if state.peers and HOP not in request.headers:
        own = {each["id"] for each in found}
        found += [each for each in await state.peers.models() if each["id"] not in own]
    ids = [each["id"] for each in found]
    page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}  # as Anthropic's API does
    return json_answer({"object": "list", "data": found, **page})


@described(ModelShape, statuses=(404, 503))
async def one_model(service: Service, request: HttpRequest) -> Response:
    """Describe a model by its name."""
    name = request.path_params["name"]
    for each in request.app.state.models.hosted:
        if each.is_called(name):
            return json_answer(_model(each.service))
    raise unknown_model(name, (each.name for each in request.app.state.models.hosted))


@described(TokensShape, body=_Text)
async def tokenize(service: Service, request: HttpRequest) -> Response:
    """Turn a text into token ids, of `content` as llama-server does, of `prompt` as vLLM does."""
    asked, llm = await read_body(request, _Text), service.engine.llm
    tokenizer, is_prompt = llm.tokenizer, asked.content is None
    text = asked.content or asked.prompt or ""
    service.check_length(llm, text)
    add_special = asked.add_special_tokens if is_prompt else asked.add_special

    def tokens() -> list[int] | list[dict[str, Any]]:
        ids = tokenizer.encode(text, add_special, asked.parse_special)
        if not asked.with_pieces:
            return ids
        pieces = [tokenizer.token_bytes(each, after_special=False) for each in ids]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        return [{"id": i, "piece": text} for i, text in zip(ids, texts, strict=True)]

    found = await service.off_loop(tokens, len(text) > LONG_TEXT)
    more = {"count": len(found), "max_model_len": llm.engine.ctx_size} if is_prompt else {}
    return json_answer({"tokens": found, **more})


@described(TextShape, body=_Tokens)
async def detokenize(service: Service, request: HttpRequest) -> Response:
    """Turn token ids into a text: `content` is llama-server's name for it, `prompt` vLLM's."""
    asked, tokenizer = await read_body(request, _Tokens), service.engine.llm.tokenizer
    if bad := [each for each in asked.tokens if not 0 <= each < tokenizer.n_vocab]:
        raise ApiError(400, f"token id {bad[0]} is not one of {tokenizer.n_vocab}", param="tokens")
    is_long = len(asked.tokens) > LONG_TEXT
    text = await service.off_loop(lambda: tokenizer.decode(asked.tokens), is_long)
    return json_answer({"content": text, "prompt": text})


@described(TokenizerShape)
async def tokenizer_info(service: Service, request: HttpRequest) -> Response:
    """Describe the tokenizer, as vLLM does."""
    found = await service.off_loop(service.learn_facts)
    return json_answer(
        {
            "tokenizer_class": found.tokenizer,
            "bos_token": found.bos_token or None,
            "eos_token": found.eos_token or None,
            "chat_template": found.template or None,
            "model_max_length": found.ctx_size,
        }
    )


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
    found = await service.off_loop(service.learn_facts)
    given, names = vars(service.sampling), {"temp": "temperature"}
    most = service.settings.max_tokens
    return json_answer(
        {
            "default_generation_settings": {
                "n_ctx": found.ctx_size,
                "params": {names.get(name, name): value for name, value in given.items()}
                | {"n_predict": most, "max_tokens": most},
            },
            "total_slots": found.n_slots,
            "model_alias": service.alias,
            "model_path": found.file_name,
            "modalities": {"vision": False, "video": False, "audio": False},
            "chat_template": found.template,
            "has_chat_template": found.has_template,
            "bos_token": found.bos_token,
            "eos_token": found.eos_token,
            "build_info": f"vkmoe {__version__}",
            "device": found.device,
            "is_sleeping": service.engine.state == "asleep",
        }
    )


@described(list[SlotShape], statuses=(501, 503))
async def slots(service: Service, request: HttpRequest) -> Response:
    """List the sequences that the KV caches hold, and what runs in them."""
    if not service.settings.slots:
        raise ApiError(501, "this server does not say what runs: start it without --no-slots")
    known, running = service.learn_facts(), service.engine.running
    kept = [
        {"n_tokens": len(each.tokens), "n_bytes": each.text.n_bytes}
        for each in service.engine.kept_prompts
    ]
    found = []
    for region in range(known.n_slots):
        slot: dict[str, Any] = {"id": region, "n_ctx": known.ctx_size}
        slot |= {"is_processing": region in running, "kept_prompts": kept}
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
