"""Ask two questions in one session, then fork it: each call computes only what no call before it has computed.

python examples/quickstart.py
"""

import asyncio

import agentkv


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        session = runtime.session("You are a careful assistant who answers in one short sentence.", max_tokens=16)
        first = await session.ask("Why do leaves fall in autumn?")
        second = await session.ask("And why do needles stay?")
        print(second.text)

        left, right = session.fork(2)  # nothing is copied: both go on from the same cached pages
        asked = {"first question": first, "second question": second}
        asked["left fork"], asked["right fork"] = await asyncio.gather(
            left.ask("Say it to a child."), right.ask("Say it to a gardener.")
        )
        for what, reply in asked.items():
            print(f"{what}: {reply.usage.cached_tokens} of {reply.usage.prompt_tokens} prompt tokens cached")


asyncio.run(main())
