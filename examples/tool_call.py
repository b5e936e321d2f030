"""Have a model call a function: it names the function and gives the arguments as JSON."""

from vkmoe import LLM, Tool

WEATHER: Tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say how the weather will be.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    },
}

with LLM() as llm:
    # "auto" leaves it to the model; the demo model does not understand the question.
    result = llm.chat(
        [{"role": "user", "content": "Will it rain in Rome?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=100,
        seed=1,
    )
    for call in result.tool_calls:
        print(f"{call.name}({call.parsed})")
