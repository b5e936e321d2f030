"""Ask for several replies at once in a program with an event loop."""

import asyncio

from vkmoe import AsyncLLM

PROMPTS = ["def add(a, b):", "def sub(a, b):", "def mul(a, b):"]


async def main() -> None:
    async with AsyncLLM(parallel=3) as llm:
        replies = [llm.generate(prompt, max_tokens=12, seed=1) for prompt in PROMPTS]
        for prompt, result in zip(PROMPTS, await asyncio.gather(*replies), strict=True):
            print(f"{prompt}{result.text}\n")


asyncio.run(main())
