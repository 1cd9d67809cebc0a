"""Hand a conversation from one agent to another: keep its head as it was, and say at its end who speaks now.

python examples/handoff.py
"""

import asyncio

import agentkv

HOUSE = "\n".join(
    ["You work at a library.", *(f"Shelf {i} holds the books whose titles have {i} words." for i in range(1, 13))]
)
CLERK = "You are the clerk: find out what the reader wants."
ARCHIVIST = "You are now the archivist: say where the book stands."


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        clerk = runtime.session(HOUSE, name="clerk", max_tokens=16)
        clerk.append({"role": "system", "content": CLERK})
        await clerk.ask("I look for a book whose title has four words.")

        # The head stays (house rules first, roles behind them), so all that the clerk read is still cached.
        archivist = clerk.fork()
        archivist.append({"role": "system", "content": ARCHIVIST})
        kept = (await archivist.ask("Which shelf is it?")).usage

        # The same with the new role at the head, as agents are often written: everything behind it is computed again.
        said = [message for message in clerk.messages if message["role"] != "system"]
        rewritten = runtime.session(f"{ARCHIVIST}\n{HOUSE}", messages=said, max_tokens=16)
        lost = (await rewritten.ask("Which shelf is it?")).usage

        print(f"stable head: {kept.cached_tokens} of {kept.prompt_tokens} prompt tokens cached")
        print(f"new head: {lost.cached_tokens} of {lost.prompt_tokens} prompt tokens cached")


asyncio.run(main())
