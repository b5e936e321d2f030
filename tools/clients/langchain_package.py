"""Checks LangChain: its classes for the APIs of OpenAI, Anthropic and Ollama, and its agents."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

from tools.clients.asked import LONG, MODEL, QUESTION, SHORT, Weather, check_call, check_same


@tool(args_schema=Weather)
def weather(city: str, days: int) -> str:
    """Say what the weather of a city is."""
    return f"sunny in {city} for {days} days"


def _models(address: str, n_tokens: int) -> list[Any]:
    """Return a model for each API; the last is Ollama's."""
    common: dict[str, Any] = {"model": MODEL, "temperature": 0}
    most: dict[str, Any] = {**common, "max_tokens": n_tokens, "api_key": "none"}
    return [
        ChatOpenAI(**most, base_url=f"{address}/v1"),
        ChatOpenAI(**most, base_url=f"{address}/v1", use_responses_api=True),
        ChatAnthropic(**most, base_url=address),
        ChatOllama(**common, base_url=address, num_predict=n_tokens),
    ]


def chat(address: str) -> None:
    texts = {model.invoke(QUESTION).text for model in _models(address, SHORT)}
    assert len(texts) == 1 and all(texts), f"APIs give different replies: {texts}"


def stream(address: str) -> None:
    for model in _models(address, SHORT):
        check_same(model.invoke(QUESTION).text, [chunk.text for chunk in model.stream(QUESTION)])


def tools(address: str) -> None:
    for model in _models(address, LONG)[:3]:  # Ollama's API cannot demand a call
        bound = model.bind_tools([weather], tool_choice="any")
        call, *_ = bound.invoke(QUESTION).tool_calls
        wanted = check_call(call["name"], call["args"])
        call, *_ = reduce(add, bound.stream(QUESTION)).tool_calls
        assert check_call(call["name"], call["args"]) == wanted
    for model in _models(address, 60)[:3]:
        agent = create_agent(model, [weather], middleware=[_calls_twice])
        said = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
        results = [message for message in said if isinstance(message, ToolMessage)]
        assert len(results) >= 2 and all("sunny in" in each.text for each in results)
        assert isinstance(said[-1], AIMessage) and said[-1].text and not said[-1].tool_calls


@wrap_model_call
def _calls_twice(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
    """Demand calls in the first two rounds, and leave out the tools in the third."""
    n_rounds = sum(isinstance(message, AIMessage) for message in request.messages)
    if n_rounds < 2:
        return handler(request.override(tool_choice="any"))
    return handler(request.override(tools=[]))


def structured(address: str) -> None:
    *openai_and_anthropic, ollama = _models(address, LONG)
    ways = [(model, way) for model in openai_and_anthropic for way in _WAYS]
    for model, way in [*ways, (ollama, "json_schema")]:
        found = model.with_structured_output(Weather, method=way).invoke(QUESTION)
        assert isinstance(found, Weather), f"{way} gives {found!r}"


_WAYS = ("json_schema", "function_calling")
