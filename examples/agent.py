"""Let a model work with tools, until it answers without calling one."""

from vkmoe import LLM, ChatMessage, Tool, ToolCall

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
}
MOST_TURNS = 5


def run(call: ToolCall) -> str:
    """Do what the model asks for, and return what it is to read."""
    if call.name == "add":
        return str(call.parsed["a"] + call.parsed["b"])
    return f"there is no tool {call.name}"


messages: list[ChatMessage] = [{"role": "user", "content": "What is 12 + 34?"}]
with LLM() as llm:
    for turn in range(MOST_TURNS):
        # Only the demo model has to be made to call: with yours, leave tool_choice out.
        choice = "required" if turn == 0 else "auto"
        reply = llm.chat(messages, tools=[ADD], tool_choice=choice, max_tokens=60, temp=0)
        messages.append(reply.message)
        if not reply.tool_calls:
            print("answer:", reply.content.strip())
            break
        for call in reply.tool_calls:
            result = run(call)
            print(f"{call.name}({call.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
