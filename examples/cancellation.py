"""Stop an answer: by a timeout, by cancelling the task that waits, or halfway with what there is kept.

python examples/cancellation.py
"""

import asyncio

import agentkv

RULES = " ".join(f"Station {i} is followed by station {i + 1}." for i in range(40))


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        session = runtime.session(RULES, max_tokens=1000, ignore_eos=True)
        await session.prefill()
        messages = session.messages

        try:
            await session.ask("Tell me of every station.", timeout=0.5)
        except TimeoutError as late:
            print(f"timeout: {late}")

        task = asyncio.create_task(session.ask("Tell me of every station."))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print(f"cancelled: {task.cancelled()}, the session is as it was: {session.messages == messages}")

        async with session.stream("Tell me of every station.") as stream:
            heard = 0
            async for event in stream:
                heard += len(event.token_ids) if isinstance(event, agentkv.TextDelta) else 0
                if heard >= 8:
                    await stream.cancel(keep=True)  # keep: the question and the half answer stay in the session
                    break
            reply = await stream.reply()
        print(f"{reply.finish_reason}: kept {len(session.messages) - len(messages)} messages")

        usage = (await session.ask("Go on.", max_tokens=8)).usage
        print(f"next question: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")


asyncio.run(main())
