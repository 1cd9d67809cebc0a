"""Go on with a conversation that was stored as messages, and meet the end of the context without losing it.

python examples/restored_history.py
"""

import asyncio
import json

import agentkv

STORED = json.dumps(
    [
        {"role": "system", "content": "You are a guide through an old town and answer in one sentence."},
        {"role": "user", "content": "Where is the mill?"},
        {"role": "assistant", "content": "The mill stands by the river, behind the second bridge."},
    ]
)


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m", context_limit=256) as runtime:
        session = runtime.session(messages=json.loads(STORED), max_tokens=16)
        prefilled = await session.prefill()  # optional: computes the history before anybody asks
        print(f"restored: {prefilled.computed_tokens} tokens computed")
        usage = (await session.ask("And the market?")).usage
        print(f"next question: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")

        before = session.mark()
        session.append("Here is a long letter: " + "the road goes up and down, " * 60)
        try:
            await session.ask("What does it say?")
        except agentkv.ContextOverflow as overflow:
            over = overflow.prompt_tokens + overflow.max_tokens - overflow.limit
            print(f"overflow: {over} tokens over {overflow.limit}")
            print(overflow)
            session.rollback(before)  # without the letter; what was cached stays cached

        print(f"{session.context_left} tokens of the context left")
        usage = (await session.ask("And the church?")).usage
        print(f"after rollback: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
        stored = json.dumps(session.messages)  # what to store for the next time
        print(f"{len(json.loads(stored))} messages to store")


asyncio.run(main())
