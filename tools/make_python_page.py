#!/usr/bin/env python3
"""Write docs/python.md from the docstrings of the public classes.

Owns the page's order and form; every word below its introduction comes from vkmoe itself. A test
compares the page with what this prints. Run it after a change of a public signature or docstring:

    .venv/bin/python -m tools.make_python_page
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from inspect import cleandoc, getdoc, getsourcefile
from pathlib import Path

from vkmoe import AsyncLLM, choices, errors
from vkmoe.config import SamplingConfig
from vkmoe.generate import loop
from vkmoe.generate.chat.collected import ToolCall
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.logprobs import LogProbs
from vkmoe.generate.loop import GenerationStatistics, Piece
from vkmoe.generate.perplexity import Estimate, Windows
from vkmoe.generate.regions.state_files import StateCounts
from vkmoe.generate.tools import events
from vkmoe.llm import LLM, messages, options, requests, results
from vkmoe.llm.results import ChatEnd, ChatResult, GenerationResult
from vkmoe.weights import placer

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "python.md"
WIDTH = 100  # of a signature
INTRODUCTION = """\
# vkmoe in Python

Made by `tools/make_python_page.py` from the docstrings. Options of the engine are the long flags of
[help.md](help.md) with `_` for `-`: `LLM("model.gguf", ctx_size=4096, expert_slots=16)`. Short
programs that run as they are: [examples](../examples).
"""
OPTIONS = (
    options.ReplyOptions,
    options.RequestOptions,
    options.TemplateOptions,
    options.ChatOptions,
)
RESULTS = (
    *(GenerationResult, ChatResult, ToolCall, GenerationStatistics, LogProbs, Piece),
    *(events.Content, events.Thought, events.ToolCallBegin, events.ToolCallArguments),
    *(events.ToolCallEnd, ChatEnd, StateCounts),
)
MEASURES = (Windows, Estimate)
MESSAGES = (
    *(messages.SystemMessage, messages.UserMessage, messages.AssistantMessage),
    *(messages.ToolMessage, messages.MadeCall, messages.CalledFunction),
    *(messages.Tool, messages.Function, messages.TextPart),
)
ALIASES = {
    requests: ("Prompt", "Prompts"),
    messages: ("ChatMessage", "Messages"),
    events: ("ReplyEvent",),
    results: ("ChatEvent",),
    loop: ("FinishReason",),
    options: ("Effort",),
    choices: ("Pooling",),
    placer: ("Progress",),
}
NOT_SHOWN = ("scheduler", "chat_format")  # for vkmoe's own threads and server
Function = ast.FunctionDef | ast.AsyncFunctionDef


def node_of(kind: type) -> ast.ClassDef:
    """Find the source of a class."""
    file = getsourcefile(kind)
    assert file is not None
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return next(node for node in found if node.name == kind.__name__)


def signature(name: str, node: Function) -> str:
    """Write how a method is called, a parameter a line where it is long."""
    given = node.args
    before = "await " if isinstance(node, ast.AsyncFunctionDef) and not _yields(node) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name[0].islower() else ""
    positional = given.args[1:]
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    parts = [_parameter(*each) for each in zip(positional, defaults[1:], strict=True)]
    if given.kwonlyargs:
        parts.append("*")
        parts += [
            _parameter(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        ]
    if given.kwarg is not None:
        parts.append(f"**{_parameter(given.kwarg, None)}")
    line = f"{before}{name}({', '.join(parts)}){returns}"
    if len(line) <= WIDTH:
        return line
    inner = "".join(f"    {part},\n" for part in parts)
    return f"{before}{name}(\n{inner}){returns}"


def _yields(node: Function) -> bool:
    return any(isinstance(each, ast.Yield) for each in ast.walk(node))


def _parameter(given: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(given.annotation)}" if given.annotation else ""
    equals = f" = {ast.unparse(default)}" if default is not None else ""
    return f"{given.arg}{kind}{equals}".replace("'", '"')


def decorators(node: Function) -> set[str]:
    return {ast.unparse(each) for each in node.decorator_list}


def methods(kind: type) -> Iterator[str]:
    """Write a class's methods in order: all signatures of one, then its docstring."""
    overloads: list[str] = []
    for node in node_of(kind).body:
        if not isinstance(node, Function):
            continue
        name = f"{kind.__name__}.{node.name}"
        is_property = decorators(node) & {"property", "cached_property"}
        if node.name == "__init__":
            yield from _method(f"{kind.__name__}()", [signature(kind.__name__, node)], node)
        elif node.name.startswith("_") or node.name in NOT_SHOWN:
            continue
        elif is_property:
            returns = f": {ast.unparse(node.returns)}" if node.returns else ""
            yield from _method(name, [f"{node.name}{returns}"], node)
        elif "overload" in decorators(node):
            overloads.append(signature(node.name, node))
        else:
            yield from _method(name, overloads or [signature(node.name, node)], node)
            overloads = []


def _method(name: str, signatures: list[str], node: Function) -> Iterator[str]:
    written = "\n".join(signatures)
    yield f"### `{name}`\n\n```python\n{written}\n```\n"
    if text := ast.get_docstring(node):
        yield f"{text}\n"


def class_with_methods(kind: type) -> Iterator[str]:
    yield f"## {kind.__name__}\n"
    yield f"{getdoc(kind)}\n"
    yield from methods(kind)


def record(kind: type) -> str:
    """Write a class by its docstring and its fields with their comments."""
    file = getsourcefile(kind)
    assert file is not None
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    node = node_of(kind)
    own = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    written = "\n".join(lines[each.lineno - 1].strip() for each in own)
    more = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    properties = [each for each in more if "property" in decorators(each)]
    notes = "".join(f"- `{each.name}`: {_first_line(each)}\n" for each in properties)
    fenced = f"```python\n{written}\n```\n" if written else ""
    text = cleandoc(ast.get_docstring(node) or "")
    return f"### `{kind.__name__}`\n\n{text}\n\n{fenced}" + (f"\n{notes}" if notes else "")


def _first_line(node: ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")


def sampling() -> Iterator[str]:
    """Write the options of sampling as a table."""
    yield "### `SamplingOptions`\n"
    yield f"{getdoc(options.SamplingOptions)}\n"
    yield f"{getdoc(SamplingConfig)}\n"
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for each in fields(SamplingConfig):
        words = each.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{each.name}` | `{each.default!r}` | {words} |")
    yield "\n".join(rows) + "\n"


def aliases() -> Iterator[str]:
    """Write what the names of unions stand for."""
    yield "## Names of types\n"
    written = []
    for module, names in ALIASES.items():
        assert module.__file__ is not None
        for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
                written.append(ast.unparse(node).replace("'", '"'))
    yield "\n".join(["```python", *written, "```"]) + "\n"


def error_tree() -> Iterator[str]:
    """Write the errors, each below the one that it is a kind of."""

    def below(kind: type[BaseException], depth: int) -> Iterator[str]:
        words = (getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"{'  ' * depth}- `{kind.__name__}`: {words}"
        for each in kind.__subclasses__():
            if each.__module__ == errors.__name__:
                yield from below(each, depth + 1)

    yield "## Errors\n"
    yield "They are in `vkmoe.errors`; each has a `hint`.\n"
    yield "\n".join(below(errors.VkmoeError, 0)) + "\n"


def examples() -> Iterator[str]:
    yield "## Examples\n"
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append(f"- [{path.name}](../examples/{path.name}): {' '.join(words.split())}")
    yield "\n".join(rows) + "\n"


def sections() -> Iterator[str]:
    yield INTRODUCTION
    for kind in (LLM, AsyncLLM):
        yield from class_with_methods(kind)
    yield "## Options of calls\n"
    yield from sampling()
    yield from map(record, OPTIONS)
    yield "## Results and events\n"
    yield from map(record, RESULTS)
    yield "## Perplexity\n\nThese are in `vkmoe.generate.perplexity`.\n"
    yield from map(record, MEASURES)
    yield "## Messages and tools\n\nThese are in `vkmoe.llm.messages`.\n"
    yield from map(record, MESSAGES)
    yield from aliases()
    yield from class_with_methods(Constraints)
    yield from error_tree()
    yield from examples()


def page() -> str:
    """Return the whole page."""
    return "\n".join(sections())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
