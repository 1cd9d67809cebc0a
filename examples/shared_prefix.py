"""Four agents at once over one long system prompt: its tokens are computed by one of them, for all.

python examples/shared_prefix.py
"""

import asyncio

import agentkv

RULES = "\n".join(
    f"Rule {i}: department {i} answers questions about shelf {i} and about no other." for i in range(1, 25)
)
QUESTIONS = {
    "ada": "Who knows shelf 3?",
    "ben": "Who knows shelf 7?",
    "cleo": "Who knows shelf 11?",
    "dan": "Who knows shelf 19?",
}


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m") as runtime:

        async def agent(name: str, question: str) -> agentkv.Usage:
            messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
            reply = await runtime.generate(messages, name=name, max_tokens=12)
            missed = {cause: tokens for cause, tokens in reply.usage.misses.items() if tokens}
            print(f"{name:<5}{reply.usage.cached_tokens:>4} of {reply.usage.prompt_tokens} cached, computed: {missed}")
            return reply.usage

        usages = await asyncio.gather(*(agent(name, question) for name, question in QUESTIONS.items()))
        total = sum(usages[1:], usages[0])
        print(f"all  {total.cached_tokens} of {total.prompt_tokens} prompt tokens came from the cache")
        print(f"hit rate of the runtime: {runtime.report().to_dict()['hit_rate']:.2f}")


asyncio.run(main())
