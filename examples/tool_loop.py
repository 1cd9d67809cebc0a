"""A tool loop of your own over stateless generate: the messages are yours, and what was said is found cached.

python examples/tool_loop.py
"""

import asyncio
from typing import Any, Literal

import agentkv

PRICES = {"tea": 3, "coffee": 4, "cocoa": 5}


def price(drink: Literal["tea", "coffee", "cocoa"]) -> int:
    """The price of a drink, in coins."""
    return PRICES[drink]


async def main() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a waiter who looks prices up."},
        {"role": "user", "content": "What do two cups of tea cost?"},
    ]
    async with agentkv.Runtime("smollm2-135m") as runtime:
        # Two looked-up prices, then an answer. tool_choice forces well-formed calls, even from a small model.
        for choice in ("price", "price", "none"):
            reply = await runtime.generate(messages, tools=[price], tool_choice=choice, max_tokens=32)
            usage = reply.usage
            print(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
            messages.append(reply.message)  # sent back, it is encoded by the very ids that the model produced
            for call in reply.tool_calls:
                result = call.error or str(price(**call.arguments))
                print(f"{call.name}({call.arguments}) -> {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        print(reply.text)


asyncio.run(main())
