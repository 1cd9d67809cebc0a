"""End an answer at a string, and see how sure the model was of each token.

python examples/stop_and_logprobs.py
"""

import asyncio
import math

import agentkv


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:
        prompt = "The colours of the rainbow: red, orange, yellow,"
        reply = await runtime.generate(prompt, stop=["violet", "\n"], logprobs=2, max_tokens=24)
        print(f"{reply.finish_reason}: {reply.text!r}")
        print(f"saved by the stop string: {24 - reply.usage.output_tokens} of 24 tokens were not generated")
        for token in reply.logprobs or ():
            text = runtime.tokenizer.decode([token.token_id])
            others = ", ".join(f"{runtime.tokenizer.decode([i])!r} {math.exp(p):.2f}" for i, p in token.top)
            print(f"{text!r:>12}  p={math.exp(token.logprob):.2f}  rank {token.rank}  likeliest: {others}")


asyncio.run(main())
