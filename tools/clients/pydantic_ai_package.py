"""Checks Pydantic AI: agents with its models for both APIs of OpenAI."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, NativeOutput, RunContext, ToolDefinition
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tools.clients.asked import LONG, MODEL, QUESTION, SHORT, Weather, check_same


def _models(address: str) -> list[Any]:
    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    kinds = (OpenAIChatModel, OpenAIResponsesModel)
    return [kind(MODEL, provider=provider) for kind in kinds]


def _agent(model: Any, n_tokens: int, **more: Any) -> Agent[None, Any]:
    return Agent(model, model_settings={"temperature": 0, "max_tokens": n_tokens}, **more)


def chat(address: str) -> None:
    texts = {_agent(model, SHORT).run_sync(QUESTION).output for model in _models(address)}
    assert len(texts) == 1 and all(texts), f"APIs give different replies: {texts}"


def stream(address: str) -> None:
    for model in _models(address):
        agent = _agent(model, SHORT)
        streamed = agent.run_stream_sync(QUESTION)
        parts = list(streamed.stream_text(delta=True, debounce_by=None))
        check_same(agent.run_sync(QUESTION).output, parts)


def tools(address: str) -> None:
    """Check that an agent calls a tool, reads its result, and answers by a call too."""
    for model in _models(address):
        assert isinstance(_answer_after_a_call(model), Weather)


def _answer_after_a_call(model: Any) -> Any:
    calls: list[str] = []

    async def first(context: RunContext, tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return [] if calls else tools

    async def then(context: RunContext, tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if calls else []

    in_turns = [PrepareTools(first), PrepareOutputTools(then)]
    agent = _agent(model, 60, output_type=Weather, capabilities=in_turns)

    @agent.tool_plain
    def is_warm(is_tomorrow: bool) -> str:
        calls.append(f"tomorrow: {is_tomorrow}")
        return "yes"

    answer = agent.run_sync(QUESTION).output
    assert calls, "the tool was not called"
    return answer


def structured(address: str) -> None:
    for model in _models(address):
        found = _agent(model, LONG, output_type=NativeOutput(Weather)).run_sync(QUESTION).output
        assert isinstance(found, Weather)
