#!/usr/bin/env python3
"""This tool lets the clients that people use talk with `vkmoe serve` and the demo model.

    tools/try_clients.py            all of them
    tools/try_clients.py openai instructor

It installs the newest releases of the clients into an environment of their own in build/clients,
starts a server on the CPU, and asks each client for a chat, a stream, a tool call and a structured
output. A line says what came; the exit code is 1 where anything failed.
"""

# mypy: ignore-errors
# (the clients are not among the packages that mypy sees)
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "clients"
PACKAGES = (
    "openai",
    "anthropic",
    "langchain-openai",
    "litellm",
    "mcp",  # for the tool calls of litellm
    "instructor",
    "pydantic-ai-slim[openai,anthropic]",
)
ADDRESS = "VKMOE_CLIENTS_ADDRESS"  # of the server, for the part that runs in the environment
ASK: Any = [{"role": "user", "content": "What will the weather be in Rome?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER},
}


def main() -> int:
    """Try the clients that are named, or all. Return the exit code."""
    address = os.environ.get(ADDRESS)
    if address is not None:
        return _try_all(sys.argv[1:], address)
    if unknown := sorted(set(sys.argv[1:]) - set(CLIENTS)):
        print(f"try_clients: no client {unknown[0]}; known are {', '.join(CLIENTS)}")
        return 2
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qU"]
    subprocess.run([*install, *PACKAGES], check=True)
    with _server() as address:
        command = [python, __file__, *(sys.argv[1:] or CLIENTS)]
        return subprocess.run(command, env={**os.environ, ADDRESS: address}).returncode


@contextmanager
def _server() -> Iterator[str]:
    """Run a server of the demo model, and yield its address."""
    command = [ROOT / ".venv/bin/vkmoe", "serve", "--device", "cpu", "-np", "2", "-c", "1024"]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                print(f"server: {line}", end="", flush=True)
                if found := re.search(r"http://[\d.]+:\d+", line):
                    yield found[0]
                    return
            raise SystemExit("try_clients: the server did not start")
        finally:
            server.terminate()


def _try_all(names: list[str], address: str) -> int:
    n_failed = 0
    for name in names:
        for task in ("chat", "stream", "tool call", "structured"):
            try:
                answer = CLIENTS[name](address, task)
                _check(task, answer)
            except Exception as error:  # whatever a client raises
                n_failed += 1
                traceback.print_exception(error, limit=-3)
                answer = "FAILED"
            print(f"{name:12} {task:10} {answer!r:.90}", flush=True)
    return int(n_failed > 0)


def _check(task: str, answer: Any) -> None:
    """Raise ValueError for an answer that is not what the task asks for."""
    if task in ("chat", "stream"):
        is_right = isinstance(answer, str) and bool(answer)
    else:
        is_right = answer.get("city") in ("Paris", "Rome") and answer.get("days") in (1, 2)
    if not is_right:
        raise ValueError(f"{task}: {answer!r}")


def _openai(address: str, task: str) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    common: Any = {"model": "demo", "messages": ASK, "max_tokens": 64, "seed": 1}
    match task:
        case "chat":
            return client.chat.completions.create(**common).choices[0].message.content
        case "stream":
            chunks = client.chat.completions.create(**common, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        case "tool call":
            reply = client.chat.completions.create(**common, tools=[TOOL], tool_choice="required")
            return json.loads(reply.choices[0].message.tool_calls[0].function.arguments)
    parsed = client.chat.completions.parse(**common, response_format=_weather_type())
    return parsed.choices[0].message.parsed.model_dump()


def _openai_responses(address: str, task: str) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    common: Any = {"model": "demo", "input": ASK, "max_output_tokens": 64}
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    match task:
        case "chat":
            return client.responses.create(**common).output_text
        case "stream":
            with client.responses.stream(**common) as events:  # ends as incomplete: at max_tokens
                deltas = [each for each in events if each.type == "response.output_text.delta"]
                return "".join(event.delta for event in deltas)
        case "tool call":
            with client.responses.stream(**common, tools=[tool], tool_choice="required") as events:
                return json.loads(events.get_final_response().output[-1].arguments)
    parsed = client.responses.parse(**common, text_format=_weather_type())
    return parsed.output_parsed.model_dump()


def _anthropic(address: str, task: str) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    common: Any = {"model": "demo", "messages": ASK, "max_tokens": 64}
    tool: Any = {"name": "weather", "description": "Tell it.", "input_schema": WEATHER}
    match task:
        case "chat":
            return client.messages.create(**common).content[0].text
        case "stream":
            with client.messages.stream(**common) as events:
                return "".join(events.text_stream)
        case "tool call":
            reply = client.messages.create(**common, tools=[tool], tool_choice={"type": "any"})
            return reply.content[-1].input
    reply = client.messages.parse(**common, output_format=_weather_type())
    return reply.parsed_output.model_dump()


def _langchain(address: str, task: str) -> Any:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model="demo", base_url=f"{address}/v1", api_key="none", max_tokens=64)
    match task:
        case "chat":
            return llm.invoke("Hello").content
        case "stream":
            return "".join(chunk.content for chunk in llm.stream("Hello"))
        case "tool call":
            reply = llm.bind_tools([TOOL], tool_choice="any").invoke("Rome?")
            return reply.tool_calls[0]["args"]
    return llm.with_structured_output(_weather_type()).invoke("Rome?").model_dump()


def _litellm(address: str, task: str) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # so that it fetches no list of prices
    import litellm

    common: Any = {"model": "openai/demo", "messages": ASK, "max_tokens": 64}
    common |= {"api_base": f"{address}/v1", "api_key": "none"}
    match task:
        case "chat":
            return litellm.completion(**common).choices[0].message.content
        case "stream":
            chunks = litellm.completion(**common, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        case "tool call":
            reply = litellm.completion(**common, tools=[TOOL], tool_choice="required")
            return json.loads(reply.choices[0].message.tool_calls[0].function.arguments)
    reply = litellm.completion(**common, response_format=_weather_type())
    return json.loads(reply.choices[0].message.content)


def _instructor(address: str, task: str) -> Any:
    import instructor
    import openai

    plain = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    mode = instructor.Mode.TOOLS if task == "tool call" else instructor.Mode.JSON_SCHEMA
    client = instructor.from_openai(plain, mode=mode)
    common: Any = {"model": "demo", "messages": ASK, "max_tokens": 64, "max_retries": 0}
    match task:
        case "chat":
            reply = client.chat.completions.create(**common, response_model=None)
            return reply.choices[0].message.content
        case "stream":
            parts = client.chat.completions.create_partial(**common, response_model=_weather_type())
            return repr(list(parts)[-1])
    return client.chat.completions.create(**common, response_model=_weather_type()).model_dump()


def _pydantic_ai(address: str, task: str) -> Any:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    model = OpenAIChatModel("demo", provider=provider)
    settings: Any = {"max_tokens": 64}
    match task:
        case "chat":
            return Agent(model, model_settings=settings).run_sync("Hello").output
        case "stream":
            stream = Agent(model, model_settings=settings).run_stream_sync("Hello")
            return list(stream.stream_text())[-1]
        case "tool call":
            kind: Any = ToolOutput(_weather_type())
        case _:
            kind = NativeOutput(_weather_type())
    agent = Agent(model, model_settings=settings, output_type=kind)
    return agent.run_sync("Rome?").output.model_dump()


def _weather_type() -> Any:
    """Return the pydantic class of what a structured output holds."""
    import pydantic

    return pydantic.create_model(
        "Weather", city=(Literal["Paris", "Rome"], ...), days=(Literal[1, 2], ...)
    )


CLIENTS: dict[str, Callable[[str, str], Any]] = {
    "openai": _openai,
    "responses": _openai_responses,
    "anthropic": _anthropic,
    "langchain": _langchain,
    "litellm": _litellm,
    "instructor": _instructor,
    "pydantic-ai": _pydantic_ai,
}

if __name__ == "__main__":
    sys.exit(main())
