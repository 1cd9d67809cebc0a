"""Read an answer while it is written, then stop another one halfway and keep what there is.

python examples/streaming.py
"""

import asyncio

import agentkv


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        async with runtime.stream("Once upon a time, in a lighthouse,", max_tokens=24) as stream:
            async for text in stream.text():
                print(text, end="", flush=True)
        reply = await stream.reply()
        print(f"\n{reply.finish_reason} after {reply.usage.output_tokens} tokens\n")

        async with runtime.stream("A list of all the rivers of Europe:", max_tokens=200) as stream:
            heard = 0
            async for event in stream:
                if isinstance(event, agentkv.TextDelta):
                    heard += len(event.token_ids)
                    if heard >= 8:
                        await stream.cancel(keep=True)  # keep: what was computed so far stays cached, to the token
                        break
        reply = await stream.reply()
        print(f"{reply.finish_reason} after {reply.usage.output_tokens} tokens: {reply.text!r}")


asyncio.run(main())
