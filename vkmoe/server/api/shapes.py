"""Describes what answers hold, for /openapi.json: the names that clients may rely on.

Answers may hold more than is named here.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

Object = dict[str, Any]


class _Problem(TypedDict):
    message: str
    type: str
    code: NotRequired[str | None]
    param: NotRequired[str | None]


class ErrorShape(TypedDict):
    """Says why a request has no answer."""

    error: _Problem


class TextErrorShape(TypedDict):
    """Says why a request has no answer, in Ollama's form."""

    error: str


class HealthShape(TypedDict):
    """Says that the model is there."""

    status: Literal["ok"]


class ModelShape(TypedDict):
    """Describes a model."""

    id: str
    object: Literal["model"]
    created: int  # seconds since 1970
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    aliases: list[str]
    tags: list[str]
    status: Object
    meta: Object | None  # of a model that was loaded


class ModelsShape(TypedDict):
    """Lists models."""

    object: Literal["list"]
    data: list[ModelShape]
    has_more: Literal[False]
    first_id: str
    last_id: str


class _Piece(TypedDict):
    id: int
    piece: str


class TokensShape(TypedDict):
    """Holds the tokens of a text, with the figures that vLLM adds to those of a `prompt`."""

    tokens: list[int] | list[_Piece]
    count: NotRequired[int]
    max_model_len: NotRequired[int]


class TextShape(TypedDict):
    """Holds the text of tokens, under llama-server's name and under vLLM's."""

    content: str
    prompt: str


class TokenizerShape(TypedDict):
    """Describes a tokenizer, in vLLM's form."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    model_max_length: int


class PromptShape(TypedDict):
    """Holds the prompt that a conversation becomes."""

    prompt: str


class InputTokensShape(TypedDict):
    """Counts the tokens of a conversation."""

    input_tokens: int


class _KeptPrompt(TypedDict):
    n_tokens: int
    n_bytes: int


class SlotShape(TypedDict):
    """Describes a region of the KV caches, and the prompts that host memory has for all of them."""

    id: int
    n_ctx: int
    is_processing: bool
    kept_prompts: list[_KeptPrompt]
    n_prompt_tokens: NotRequired[int]
    n_prompt_tokens_processed: NotRequired[int]
    n_prompt_tokens_cache: NotRequired[int]
    n_decoded: NotRequired[int]


class SlotFileShape(TypedDict):
    """Counts what was saved, restored or forgotten of a region of the KV caches."""

    id_slot: int
    filename: NotRequired[str]
    n_saved: NotRequired[int]
    n_written: NotRequired[int]
    n_restored: NotRequired[int]
    n_read: NotRequired[int]
    n_erased: NotRequired[int]


class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Object


class _Completed(TypedDict):
    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str
    usage: _Usage
    timings: Object


class _CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: Object | None
    finish_reason: Literal["stop", "length"]


class CompletionShape(_Completed):
    """Holds texts that go on from prompts."""

    object: Literal["text_completion"]
    choices: list[_CompletionChoice]


class NativeShape(TypedDict):
    """Holds a text that goes on, in llama-server's form."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: Object
    prompt: str
    stop_type: Literal["eos", "limit", "word"]
    timings: Object


class _Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsShape(TypedDict):
    """Holds the vectors of texts: numbers, or their bytes in base64."""

    object: Literal["list"]
    data: list[_Embedding]
    model: str
    usage: dict[str, int]


class NativeEmbeddingShape(TypedDict):
    """Holds the vector of a text, or those of its tokens, in llama-server's form."""

    index: int
    embedding: list[list[float]]


class _ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[Object]]


class _ChatChoice(TypedDict):
    index: int
    message: _ChatMessage
    logprobs: Object | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatShape(_Completed):
    """Holds replies in a conversation."""

    object: Literal["chat.completion"]
    choices: list[_ChatChoice]


class ResponseShape(TypedDict):
    """Holds a response: items of text, thought and calls."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since 1970
    model: str
    status: Literal["completed", "incomplete", "in_progress"]
    output: list[Object]
    usage: Object | None
    incomplete_details: Object | None


class MessageShape(TypedDict):
    """Holds a message: blocks of text, thought and uses of tools."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class _OllamaReply(TypedDict):
    """Counts tokens, and nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    logprobs: NotRequired[list[Object]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class _OllamaMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Object]]


class OllamaChatShape(_OllamaReply):
    """Holds a reply in a conversation, in Ollama's form."""

    message: _OllamaMessage


class OllamaTextShape(_OllamaReply):
    """Holds a text that goes on, in Ollama's form."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class OllamaEmbeddingsShape(TypedDict):
    """Holds vectors of texts, in Ollama's form."""

    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingShape(TypedDict):
    """Holds the vector of a text, in the form of older clients of Ollama."""

    embedding: list[float]


class VersionShape(TypedDict):
    """Says which version of an API is spoken."""

    version: str


class _OllamaDetails(TypedDict):
    parent_model: str
    format: Literal["gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _OllamaModel(TypedDict):
    name: str
    model: str
    size: int  # bytes
    digest: str
    details: _OllamaDetails


class _OllamaListed(_OllamaModel):
    modified_at: str


class _OllamaRunning(_OllamaModel):
    expires_at: str
    size_vram: int  # bytes
    context_length: int


class OllamaModelsShape(TypedDict):
    """Lists models, in Ollama's form."""

    models: list[_OllamaListed]


class OllamaRunningShape(TypedDict):
    """Lists models that are loaded, in Ollama's form."""

    models: list[_OllamaRunning]


class OllamaModelShape(TypedDict):
    """Describes a model, in Ollama's form."""

    modelfile: str
    parameters: str
    template: str
    details: _OllamaDetails
    model_info: Object
    capabilities: list[Literal["completion", "tools", "insert", "thinking"]]
    modified_at: str
    license: NotRequired[str]
    tensors: NotRequired[list[Object]]
