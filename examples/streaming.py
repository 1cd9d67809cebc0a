"""Watch a task being worked on: text as it is written, calls as the model makes them, results as the tools return.

python examples/streaming.py
"""

import asyncio
from typing import Literal

import agentkv

STOCK = {"apples": 12, "pears": 0, "plums": 7}


def in_stock(fruit: Literal["apples", "pears", "plums"]) -> int:
    """How many pieces of a fruit the shop has.

    Args:
        fruit: which fruit
    """
    return STOCK[fruit]


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        session = runtime.session("You answer customers of a fruit shop.", tools=[in_stock], max_tokens=48)
        # tool_choice: a model this small would rather talk; it has to call a tool before it may answer.
        async with session.run_stream("How many plums are left?", tool_choice="required", max_turns=3) as stream:
            async for event in stream:
                match event:
                    case agentkv.TextDelta(text=text):
                        print(text, end="", flush=True)
                    case agentkv.ToolCallDelta(arguments_text=text):
                        print(text, end="", flush=True)
                    case agentkv.ToolResult(call=call, content=content):
                        print(f"\n{call.name}({call.arguments}) returned {content}")
                    case agentkv.TurnEnd(reply=reply):
                        usage = reply.usage
                        print(f"\nturn: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
            run = await stream.run()
        print(f"{len(run.tool_results)} tool calls in {run.turns} turns, stopped by {run.stopped}")


asyncio.run(main())
