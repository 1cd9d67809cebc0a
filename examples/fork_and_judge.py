"""Three drafts by forks of one session, and a fourth fork that judges them: the common part is computed once.

python examples/fork_and_judge.py
"""

import asyncio

import agentkv

BRIEF = "\n".join(
    [
        "You write names for boats.",
        *(f"Rule {i}: a name has no more than {i + 2} letters on side {i}." for i in range(12)),
    ]
)


async def main() -> None:
    async with agentkv.Runtime("smollm2-135m", seed=3) as runtime:
        author = runtime.session(BRIEF, name="author", max_tokens=12)
        author.append("A grey boat that is fast in the wind.")
        prefilled = await author.prefill()
        print(f"brief: {prefilled.computed_tokens} tokens computed")

        # Each fork draws by a seed of its own place in the tree: the same drafts in every run, in any order.
        drafts = await asyncio.gather(*(fork.ask(temperature=0.9) for fork in author.fork(3)))
        judge = author.fork()
        listed = "\n".join(f"{number}. {draft.text}" for number, draft in enumerate(drafts, 1))
        verdict = await judge.ask(f"Here are three drafts:\n{listed}\nWhich is best?")

        for name, reply in (*((f"draft {i}", draft) for i, draft in enumerate(drafts, 1)), ("judge", verdict)):
            print(f"{name}: {reply.usage.cached_tokens} of {reply.usage.prompt_tokens} prompt tokens cached")


asyncio.run(main())
