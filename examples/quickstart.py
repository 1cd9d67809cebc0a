"""Ask a model twice: the second call computes one token of its prompt, because the rest is cached.

python examples/quickstart.py
"""

import asyncio

import agentkv

MESSAGES = [
    {"role": "system", "content": "You are a careful assistant who answers in one short sentence."},
    {"role": "user", "content": "Why do leaves fall in autumn?"},
]


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        for attempt in ("first", "second"):
            reply = await runtime.generate(MESSAGES, max_tokens=24)
            usage = reply.usage
            print(f"{attempt}: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
        print(reply.text)


asyncio.run(main())
