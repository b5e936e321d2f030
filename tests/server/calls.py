"""A model of which a tool is asked: a template that writes calls, the tool, the question."""

from __future__ import annotations

import json
from typing import Any

from vkmoe.config import EngineConfig
from vkmoe.llm import LLM

# As Qwen3's: tools and calls between the same marks.
TEMPLATE = """
{%- if tools %}# Tools\\n{% for tool in tools %}{{ tool | tojson }}\\n{% endfor %}
For calls: <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant:"""
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
ASK: Any = [{"role": "user", "content": "How is the weather?"}]


def with_template() -> LLM:
    return LLM(None, EngineConfig(ctx_size=1024, parallel=2), chat_template=TEMPLATE)


def is_asked(arguments: str) -> bool:
    """Whether arguments, as JSON, are of the tool's schema."""
    value, choices = json.loads(arguments), WEATHER["properties"]
    return value.keys() == choices.keys() and all(value[x] in choices[x]["enum"] for x in value)
