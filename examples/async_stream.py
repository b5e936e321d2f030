"""Stream a chat in a program with an event loop, and stop reading when that is enough."""

import asyncio
from contextlib import aclosing

from vkmoe import AsyncLLM, ChatEnd, Content


async def main() -> None:
    async with AsyncLLM() as llm:
        question = [{"role": "user", "content": "def main():"}]
        async for event in llm.chat_stream(question, max_tokens=24, seed=3):
            if isinstance(event, Content):
                print(event.text, end="", flush=True)
            elif isinstance(event, ChatEnd):
                print(f"\n[{event.result.finish_reason}]")

        n_lines = 0
        async with aclosing(llm.stream("import os\n", seed=1)) as pieces:  # ends it at once
            async for piece in pieces:
                n_lines += piece.text.count("\n")
                if n_lines == 3:
                    break
        print(f"stopped after {n_lines} lines")


asyncio.run(main())
