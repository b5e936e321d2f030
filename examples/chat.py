"""Talk with a model over several turns, with a system prompt."""

from vkmoe import LLM, ChatMessage

messages: list[ChatMessage] = [{"role": "system", "content": "You write Python."}]

with LLM() as llm:
    for question in ("import os", "def read(path):"):
        messages.append({"role": "user", "content": question})
        result = llm.chat(messages, max_tokens=24, seed=1)
        messages.append(result.message)
        print(f"> {question}\n{result.content}")
