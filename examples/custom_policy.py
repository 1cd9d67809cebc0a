"""A policy of your own: pages of calls named "planner" are the last to be evicted.

python examples/custom_policy.py
"""

import asyncio

import agentkv
from agentkv.policies import Node


class PlannerStays:
    """Smallest key first: what only others use goes before what the planner uses, the oldest first in both."""

    def key(self, node: Node) -> tuple[bool, int]:
        return ("planner" in node.owners, node.last_access)


def prompt(subject: str) -> list[int]:
    """128 token ids that begin with no other subject's."""
    first = sum(map(ord, subject)) * 7 % 40_000
    return list(range(first, first + 128))


async def main() -> None:
    for policy in ("lru", PlannerStays()):
        # Room for four such prompts: a fifth has to push somebody out.
        async with agentkv.Runtime("smollm2-135m", policy=policy, num_pages=1 + 4 * 9) as runtime:
            await runtime.generate(prompt("plan"), name="planner", max_tokens=1)
            for worker in ("sort", "find", "merge", "split", "count"):
                await runtime.generate(prompt(worker), name=worker, max_tokens=1)
            reply = await runtime.generate(prompt("plan"), name="planner", max_tokens=1)
            name = policy if isinstance(policy, str) else type(policy).__name__
            print(f"{name}: {reply.usage.cached_tokens} of {reply.usage.prompt_tokens} tokens of the plan still cached")


asyncio.run(main())
