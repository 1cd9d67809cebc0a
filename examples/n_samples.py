"""Several answers to one prompt, drawn with a seed: the prompt is computed once, and the draws can be repeated.

python examples/n_samples.py
"""

import asyncio

import agentkv

PROMPT = "Three names for a grey cat:"


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 12}
        replies = await runtime.generate(PROMPT, n=3, **sampling)
        for reply in replies:
            print(repr(reply.text))
        # The prompt is counted in the first reply alone, so that the sum is what the call cost.
        print("prompt tokens computed:", sum(reply.usage.computed_tokens for reply in replies))

        again = await runtime.generate(PROMPT, n=3, **sampling)
        print("the same seed gives the same answers:", [r.text for r in again] == [r.text for r in replies])


asyncio.run(main())
