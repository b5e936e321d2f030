"""Describes the bodies of requests, and what their fields mean for a reply.

Names and meanings are those of OpenAI's API, with llama-server's where that has none. What becomes
of other fields is in known_fields.py.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import Request

from vkmoe.config import SamplingConfig
from vkmoe.errors import UsageError
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.option_fields import parse_breakers
from vkmoe.server.errors import ApiError
from vkmoe.server.known_fields import MOST_ITEMS, Api, refuse_unsupported

MOST_STOPS, MOST_STOP_LENGTH = 16, 1024
Number = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[Number, Field(ge=-100, le=100)] | Literal[False]  # false: never
TokenOrText = Annotated[int, Field(ge=0)] | Annotated[str, Field(max_length=MOST_STOP_LENGTH)]
Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
Many = Annotated[
    list[Item], Field(fail_fast=True, max_length=MOST_ITEMS)
]  # else each wrong item has an error of kilobytes
Tokens = Annotated[list[int], Field(fail_fast=True)]

MOST_BIASES = 1 << 16

MOST_REPLIES = 16  # `n`
MOST_SEED = (1 << 63) - 1


def _bounds(name: str) -> Any:
    """Return the bounds of an option of SamplingConfig, for the field of a body."""
    about = SamplingConfig.__dataclass_fields__[name].metadata
    return Field(ge=about["minimum"], le=about["maximum"])


class Body(BaseModel):
    """Is the base of all bodies. One with an `api` has fields that are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)
    api: ClassVar[Api | None] = None


class ReplyFields(Body):
    """Says how tokens are chosen and what ends a reply; what is None is as the server has it."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    n_predict: Annotated[int, Field(ge=-1)] | None = None  # llama-server's name for it
    seed: Annotated[int, Field(ge=-1, le=MOST_SEED)] | None = None
    stop: str | Many[str] | None = None
    temperature: Annotated[Number, _bounds("temp")] | None = None
    top_p: Annotated[Number, _bounds("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0, -1: all
    min_p: Annotated[Number, _bounds("min_p")] | None = None
    typical_p: Annotated[Number, _bounds("typical_p")] | None = None
    xtc_probability: Annotated[Number, _bounds("xtc_probability")] | None = None
    xtc_threshold: Annotated[Number, _bounds("xtc_threshold")] | None = None
    repeat_penalty: Annotated[Number, _bounds("repeat_penalty")] | None = None
    repeat_last_n: Annotated[int, _bounds("repeat_last_n")] | None = None
    presence_penalty: Annotated[Number, _bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[Number, _bounds("frequency_penalty")] | None = None
    dry_multiplier: Annotated[Number, _bounds("dry_multiplier")] | None = None
    dry_base: Annotated[Number, _bounds("dry_base")] | None = None
    dry_allowed_length: Annotated[int, _bounds("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, _bounds("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Many[str] | None = None
    mirostat: Annotated[int, _bounds("mirostat")] | None = None
    mirostat_tau: Annotated[Number, _bounds("mirostat_tau")] | None = None
    mirostat_eta: Annotated[Number, _bounds("mirostat_eta")] | None = None
    # As in OpenAI's API; llama-server also takes pairs, and texts for all of their tokens.
    logit_bias: dict[TokenOrText, Bias] | Many[tuple[TokenOrText, Bias]] | None = None
    ignore_eos: bool | None = None
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens", "n_predict")  # names of one number

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > MOST_BIASES:
            raise ValueError(f"at most {MOST_BIASES} tokens")
        if isinstance(value, list):  # whose pairs are no tuples in JSON
            return [tuple(each) if isinstance(each, list) else each for each in value]
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS or any(len(stop) > MOST_STOP_LENGTH for stop in stops):
            raise ValueError(f"at most {MOST_STOPS} texts of {MOST_STOP_LENGTH} characters each")
        return [stop for stop in stops if stop]

    @field_validator("dry_sequence_breakers")
    @classmethod
    def _sound_breakers(cls, value: list[str] | None) -> list[str] | None:
        try:
            parse_breakers(json.dumps(value or []))
        except UsageError as error:
            raise ValueError(f"{error}: {error.hint}") from None
        return value

    @property
    def n_replies(self) -> int:
        """Return how many replies each prompt has."""
        return 1

    def biases(self, tokenizer: Tokenizer) -> dict[int, float]:
        """Return what is added to the logits of tokens; minus infinity for never."""
        given, found = self.logit_bias or {}, dict[int, float]()
        for key, value in given.items() if isinstance(given, dict) else given:
            is_id = isinstance(key, int) or (isinstance(given, dict) and key.isdecimal())
            tokens = [int(key)] if is_id else tokenizer.encode(str(key), add_special=False)
            found |= dict.fromkeys(tokens, -math.inf if value is False else float(value))
        return found

    def most_tokens(self, default: int) -> int | None:
        """Return the most tokens of a reply; None: until the context is full, as -1 says.

        Raises ApiError where its names say several numbers.
        """
        asked = {name: getattr(self, name) for name in self.lengths}
        given = {name: number for name, number in asked.items() if number is not None}
        if len(set(given.values())) > 1:
            message = f"{' and '.join(given)} are names of one number, and contradict each other"
            raise ApiError(400, message, param=list(given)[-1])
        number = next(iter(given.values()), default)
        return None if number == -1 else number

    def sampling(self, default: SamplingConfig, index: int = 0) -> SamplingConfig:
        """Say how the tokens of the index-th of `n` replies are chosen.

        The first has the seed that was asked for, the others have seeds that follow from it.
        """
        names = {item.name for item in fields(SamplingConfig)}
        asked = self.model_dump(include=names, exclude_none=True)
        if self.temperature is not None:
            asked["temp"] = self.temperature
        asked |= {"top_k": max(0, self.top_k)} if self.top_k is not None else {}
        if self.dry_sequence_breakers is not None:
            asked["dry_sequence_breakers"] = json.dumps(self.dry_sequence_breakers)
        seed = asked.pop("seed", default.seed)
        if seed is not None and seed >= 0:
            child = np.random.SeedSequence([seed, index]).generate_state(1)
            asked["seed"] = seed if index == 0 else int(child[0])
        else:
            asked["seed"] = None
        return replace(default, **asked)


class _StreamOptions(Body):
    include_usage: bool | None = None


class ChoiceFields(ReplyFields):
    """Says what OpenAI's older APIs have besides: several replies, figures beside them."""

    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_REPLIES)] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    verbose: bool | None = None
    return_routed_experts: bool | None = None

    @property
    def n_replies(self) -> int:
        """Return how many replies each prompt has."""
        return self.n or 1


async def read_body(request: Request, model: type[Model]) -> Model:
    """Read the JSON body of a request. Raises ApiError that names what is wrong with it."""
    return checked(model, await body_of(request))


async def body_of(request: Request) -> dict[str, Any]:
    """Return the JSON object that the body of a request is, unchecked. Raises ApiError."""
    if not hasattr(request.state, "body"):
        body = await request.body()
        try:
            with _nothing_collected():
                value = json.loads(body, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            message = f"the body is not JSON: {reason}"
            raise ApiError(400, message, code="invalid_json") from None
        if not isinstance(value, dict):
            raise ApiError(400, "the body is not a JSON object", code="invalid_json")
        request.state.body = value
    found: dict[str, Any] = request.state.body
    return found


def read_query(request: Request, model: type[Model]) -> Model:
    """Read the query of a request. Raises ApiError that names what is wrong with it."""
    return checked(model, dict(request.query_params), is_text=True)


def checked(model: type[Model], value: dict[str, Any], is_text: bool = False) -> Model:
    """Check the fields of an object. Raises ApiError for the first that is wrong.

    With `is_text` all of them are texts, which numbers are read from.
    """
    try:
        if issubclass(model, Body) and model.api is not None:
            refuse_unsupported(model.api, value)
        return model.model_validate(value, strict=not is_text)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise ApiError(400, "the body is nested too deeply") from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = next((each for each in errors if each["type"] == "too_long"), errors[0])
        place = ".".join(_names(first["loc"], value, first["type"] == "missing")) or None
        message = f"{place}: {first['msg']}" if place else first["msg"]
        raise ApiError(400, message, param=place, code="invalid_value") from None


def _names(path: Sequence[str | int], value: Any, is_missing: bool) -> Iterator[str]:
    """Yield the names on a path of pydantic's, which has those of types among them."""
    for index, name in enumerate(path):
        is_key = isinstance(value, dict) and name in value
        if is_key or (isinstance(value, list) and isinstance(name, int)):
            value = value[name]
        elif not (is_missing and index + 1 == len(path)):
            continue
        yield str(name)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep Python from looking for garbage among a million new lists, again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    """Read a number; one that is too large would be infinity, which no answer can give back."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is too large")
    return value
